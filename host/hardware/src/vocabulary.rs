//! Texts of `/sys` that a snapshot keeps: those that the kernel, or the maker of hardware, gives to all machines of a kind. Pure.
//!
//! A text attribute may be a name that a person gave to a device, or a number that only this device has, and no list can name all of them.
//! So the vocabulary names what is kept, and every other word is replaced: numbers and the words of [`WORDS`] are kept in every file, names
//! of entries of the snapshot too, and every text of the files of [`KEPT`].

use std::collections::HashSet;
use std::ops::Range;
use std::sync::LazyLock;

use globset::GlobSet;

use crate::identifiers::glob_set;

/// Files whose whole content is kept, unless it has an identifier.
#[derive(Clone, Copy, Debug)]
pub struct Kept {
    /// Globs of paths: `*` matches within a segment, `**` any segments.
    pub files: &'static [&'static str],
    /// Description of their content.
    pub content: &'static str,
}

/// The files whose texts, and contents that are not text, are kept.
pub const KEPT: &[Kept] = &[
    Kept {
        files: &[
            "**/modalias",
            "**/{idVendor,idProduct,bcdDevice}",
            "**/subsystem_{vendor,device}",
            "/sys/devices/pci*/**/{product_name,product_number,vbios_version}",
            "/sys/devices/pci*/**/mdev_supported_types/*/{name,description,device_api}",
            "/sys/devices/pci*/**/nvme/nvme*/{model,firmware_rev}",
            "/sys/devices/pci*/**/infiniband/*/{board_id,fw_ver,hca_type}",
            "**/dmi/id/{bios,board,chassis,ec,product}_{vendor,name,version,date,release,family,sku,type,firmware_release}",
            "**/dmi/id/{sys_vendor,modalias}",
        ],
        content: "what a machine, a board or a device is called by its maker",
    },
    Kept {
        files: &[
            "/sys/devices/system/**",
            "/sys/kernel/**",
            "/sys/firmware/devicetree/**",
            "/sys/module/*/version",
            "/sys/class/*/version",
            "/sys/devices/LNXSYSTM:*/**/{hid,path}",
            "/sys/devices/pnp*/**/{id,resources}",
            "/sys/devices/virtual/thermal/*/type",
            "**/hwmon/hwmon*/{name,*_label}",
            "**/net/*/phys_port_name",
            "**/drm/*/modes",
            "**/queue/*",
        ],
        content: "processors, memory, interrupts, kernel modules, and what drivers and the firmware call their parts",
    },
    Kept {
        files: &["**/config", "**/descriptors", "**/report_descriptor"],
        content: "tables of PCI functions, USB and HID devices, which are not text and have no serial numbers",
    },
];

/// Keys of `uevent` files whose values are kept.
pub const UEVENT_KEYS: &[&str] = &[
    "DEVMODE",
    "DEVNAME",
    "DEVTYPE",
    "DRIVER",
    "HID_ID",
    "IFINDEX",
    "INTERFACE",
    "MAJOR",
    "MINOR",
    "MODALIAS",
    "OF_COMPATIBLE_0",
    "OF_COMPATIBLE_1",
    "OF_FULLNAME",
    "OF_NAME",
    "OF_TYPE",
    "PCI_CLASS",
    "PCI_ID",
    "PCI_SLOT_NAME",
    "PCI_SUBSYS_ID",
    "PRODUCT",
    "SDIO_ID",
    "SUBSYSTEM",
    "TYPE",
];

/// Words of the kernel, in small letters: states, modes, and units of numbers.
pub const WORDS: &[&str] = &[
    "a",
    "ac",
    "active",
    "all",
    "apic",
    "any",
    "asleep",
    "ata",
    "atapi",
    "async",
    "attached",
    "auto",
    "b",
    "back",
    "base",
    "bfq",
    "bit",
    "block",
    "both",
    "bus",
    "byte",
    "bytes",
    "c",
    "cdrom",
    "cfq",
    "change",
    "char",
    "charging",
    "cm",
    "code",
    "conf",
    "configured",
    "connected",
    "critical",
    "d",
    "data",
    "dax",
    "db",
    "dead",
    "deadline",
    "default",
    "delay",
    "detached",
    "device",
    "disable",
    "disabled",
    "disconnected",
    "discharging",
    "disk",
    "display",
    "dma",
    "dormant",
    "dp",
    "dpm",
    "drm",
    "dual",
    "dvi",
    "edge",
    "edr",
    "eject",
    "embedded",
    "enable",
    "enabled",
    "enx",
    "error",
    "ethernet",
    "event",
    "external",
    "fail",
    "failed",
    "fair",
    "falling",
    "false",
    "fast",
    "fdr",
    "fixed",
    "forbidden",
    "freeze",
    "full",
    "function",
    "g",
    "gb",
    "gen",
    "ghz",
    "gib",
    "gpu",
    "gt",
    "h",
    "half",
    "hardware",
    "hdmi",
    "hdr",
    "hid",
    "high",
    "host",
    "hotplug",
    "hub",
    "hz",
    "i",
    "ib",
    "in",
    "inactive",
    "infiniband",
    "initiator",
    "input",
    "instruction",
    "integrated",
    "interface",
    "internal",
    "interrupt",
    "invalid",
    "io",
    "irq",
    "isolated",
    "j",
    "k",
    "kb",
    "kbit",
    "keyboard",
    "khz",
    "kib",
    "kyber",
    "level",
    "line",
    "link",
    "linkup",
    "live",
    "lost",
    "low",
    "lowerlayerdown",
    "lpm",
    "m",
    "ma",
    "mah",
    "major",
    "manual",
    "mask",
    "max",
    "media",
    "mb",
    "mbps",
    "medium",
    "mem",
    "memory",
    "mhz",
    "mib",
    "microwatt",
    "min",
    "minor",
    "mod",
    "mode",
    "mouse",
    "mq",
    "ms",
    "msi",
    "msix",
    "mv",
    "mw",
    "n",
    "na",
    "ndr",
    "net",
    "nic",
    "no",
    "node",
    "none",
    "noop",
    "normal",
    "not",
    "notpresent",
    "ns",
    "null",
    "nvme",
    "off",
    "offline",
    "ok",
    "on",
    "online",
    "or",
    "out",
    "p",
    "pass",
    "passive",
    "pci",
    "pcie",
    "performance",
    "pf",
    "phy",
    "phys",
    "pio",
    "pmem",
    "port",
    "power",
    "powersave",
    "present",
    "primary",
    "qdr",
    "r",
    "rate",
    "raw",
    "rc",
    "read",
    "ready",
    "request",
    "removable",
    "removed",
    "rising",
    "ro",
    "root",
    "running",
    "rw",
    "s",
    "sas",
    "sata",
    "schedutil",
    "sd",
    "sdr",
    "sec",
    "secondary",
    "self",
    "serial",
    "shared",
    "simple",
    "single",
    "slave",
    "slot",
    "slow",
    "standard",
    "standby",
    "start",
    "state",
    "status",
    "stop",
    "stopped",
    "supported",
    "suspended",
    "suspending",
    "switch",
    "sys",
    "system",
    "t",
    "target",
    "tb",
    "temp",
    "testing",
    "text",
    "through",
    "thunderbolt",
    "tib",
    "timer",
    "to",
    "total",
    "transport",
    "trim",
    "true",
    "type",
    "udma",
    "uhci",
    "ehci",
    "xhci",
    "ohci",
    "unified",
    "unknown",
    "unlimited",
    "unset",
    "unsupported",
    "up",
    "us",
    "usb",
    "used",
    "user",
    "v",
    "valid",
    "version",
    "vf",
    "vga",
    "virtio",
    "virtual",
    "w",
    "wakeup",
    "warning",
    "wifi",
    "write",
    "x",
    "xdr",
    "xfer",
    "y",
    "yes",
    "zoned",
];

/// Digits of a number: those of 64 bits.
const DIGITS_MAX: usize = 20;
/// Digits of a hexadecimal number after `0x`.
const HEX_DIGITS_MAX: usize = 16;
/// Digits of a hexadecimal number without a sign of it, as of an ID or a part of a mask.
const BARE_HEX_DIGITS_MAX: usize = 8;

static FILES: LazyLock<GlobSet> =
    LazyLock::new(|| glob_set(KEPT.iter().flat_map(|kept| kept.files)));

/// Returns whether a file's whole content is kept. Only `/sys` has texts that persons give to devices.
pub(crate) fn is_kept(path: &str) -> bool {
    !path.starts_with("/sys/") || FILES.is_match(path)
}

/// Returns where a text has words that are not of the vocabulary, in order. `names`: those of the snapshot's entries.
pub(crate) fn unknown_words(path: &str, text: &str, names: &HashSet<&str>) -> Vec<Range<usize>> {
    if is_kept(path) {
        return Vec::new();
    }
    let mut unknown = Vec::new();
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        let value = if path.ends_with("/uevent") {
            value_of_uevent(line)
        } else {
            Some(0)
        };
        if let Some(offset) = value {
            unknown_in(
                text,
                start + offset..start + line.len(),
                is_part,
                names,
                &mut unknown,
            );
        }
        start += line.len();
    }
    unknown
}

/// Returns where the value of a line of a `uevent` file begins, unless its key says that it is kept.
fn value_of_uevent(line: &str) -> Option<usize> {
    match line.split_once('=') {
        Some((key, _)) if UEVENT_KEYS.contains(&key) => None,
        Some((key, _)) => Some(key.len() + 1),
        None => Some(0),
    }
}

/// Adds the words in a part of a text that are not known. A word that is not known as a whole may be of known words.
fn unknown_in(
    text: &str,
    part: Range<usize>,
    is_of_word: fn(char) -> bool,
    names: &HashSet<&str>,
    unknown: &mut Vec<Range<usize>>,
) {
    for word in text[part]
        .split(|c| !is_of_word(c))
        .filter(|word| !word.is_empty())
    {
        let start = word.as_ptr().addr() - text.as_ptr().addr();
        let range = start..start + word.len();
        if names.contains(word) || is_word(word) || is_number(word) {
            continue;
        }
        match word.chars().all(char::is_alphanumeric) {
            true => unknown.push(range),
            false => unknown_in(text, range, char::is_alphanumeric, names, unknown),
        }
    }
}

/// Characters within the names that the kernel gives.
fn is_part(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '+')
}

/// A word of the kernel, with a number before or after it: `state3`, `100mA`.
fn is_word(word: &str) -> bool {
    let letters = word.trim_matches(|c: char| c.is_ascii_digit());
    let digits = word.len() - letters.len();
    digits <= DIGITS_MAX && WORDS.contains(&letters.to_ascii_lowercase().as_str())
}

fn is_number(word: &str) -> bool {
    if let Some(digits) = word.strip_prefix("0x").or_else(|| word.strip_prefix("0X")) {
        return is_hex(digits) && digits.len() <= HEX_DIGITS_MAX;
    }
    let unsigned = word.trim_start_matches(['+', '-']);
    // `cafe` is a word, and `00ff`, `ff` and `ffffffff` are numbers.
    let has_form = word.len() <= 2
        || word.len() == BARE_HEX_DIGITS_MAX
        || word.bytes().any(|byte| byte.is_ascii_digit());
    unsigned.split('.').all(is_decimal)
        || is_hex(word) && word.len() <= BARE_HEX_DIGITS_MAX && has_form
}

fn is_hex(word: &str) -> bool {
    !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn is_decimal(word: &str) -> bool {
    !word.is_empty() && word.len() <= DIGITS_MAX && word.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unknown<'a>(path: &str, text: &'a str) -> Vec<&'a str> {
        let names = HashSet::from(["acpi-cpufreq", "0000:00:02.0", "mlx5_0"]);
        unknown_words(path, text, &names)
            .into_iter()
            .map(|range| &text[range])
            .collect()
    }

    #[test]
    fn kernel_numbers_and_words_are_known() {
        for text in [
            "0x8086\n",
            "-1\n",
            "12345678901234567890",
            "2.5 GT/s PCIe",
            "100mA",
            "ffffffff,0000000f",
            "00ff",
            "0-3,8-11",
            "[none] mq-deadline kyber",
            "Not present",
            "0000:00:02.0",
            "acpi-cpufreq",
            "mlx5_0 port 1",
            "1: 300Mhz *",
            "<unsupported>",
            "write back",
            "max_power",
            "24.3.1-10",
            "",
        ] {
            assert_eq!(unknown("/sys/a/b", text), [""; 0], "{text:?}");
        }
    }

    #[test]
    fn personal_names_and_serials_are_unknown() {
        for (text, words) in [
            ("Alice's iPhone\n", &["Alice", "iPhone"][..]),
            ("ada\nCafe\n", &["ada", "Cafe"]),
            (
                "32424a32333030363800000000000000",
                &["32424a32333030363800000000000000"],
            ),
            ("848f69fecc40", &["848f69fecc40"]),
            ("S3EWNX0K123456", &["S3EWNX0K123456"]),
            ("usb-Bertha_1 slot 3", &["Bertha"]),
            ("Zoë 漢字", &["Zoë", "漢字"]),
            ("123456789012345678901", &["123456789012345678901"]),
        ] {
            assert_eq!(unknown("/sys/a/product", text), words, "{text:?}");
        }
    }

    #[test]
    fn known_uevent_keys_keep_values() {
        let text =
            "DRIVER=btusb-next\nHID_NAME=Alice Keyboard\nNAME=\"Bertha\"\nMAJOR=13\nEV=120013\n";
        assert_eq!(unknown("/sys/a/uevent", text), ["Alice", "Bertha"]);
    }

    #[test]
    fn vocabulary_files_keep_their_texts() {
        let function = "/sys/devices/pci0000:00/0000:00:02.0";
        for path in [
            &format!("{function}/product_name"),
            &format!("{function}/modalias"),
            &format!("{function}/nvme/nvme0/model"),
            "/sys/devices/virtual/dmi/id/product_name",
            "/sys/devices/system/clocksource/clocksource0/current_clocksource",
            "/proc/cpuinfo",
        ] {
            assert_eq!(unknown(path, "AMD Instinct MI300X"), [""; 0], "{path}");
        }
        for path in [
            &format!("{function}/usb1/1-1/product"),
            &format!("{function}/host0/target0:0:0/0:0:0:0/model"),
            "/sys/devices/virtual/nvme-fabrics/ctl/nvme0/model",
            "/sys/devices/virtual/dmi/id/product_serial",
        ] {
            assert_eq!(unknown(path, "Instinct"), ["Instinct"], "{path}");
        }
    }

    #[test]
    fn words_are_lowercase_and_unique() {
        let once: HashSet<_> = WORDS.iter().collect();
        assert_eq!(once.len(), WORDS.len());
        assert!(
            WORDS
                .iter()
                .all(|word| word.bytes().all(|byte| byte.is_ascii_lowercase()))
        );
    }

    #[test]
    fn the_page_lists_what_is_kept() {
        let page = std::fs::read_to_string(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../docs/simulation.md"
        ))
        .unwrap();
        for kept in KEPT {
            assert!(
                page.contains(kept.content),
                "docs/simulation.md must have: {}",
                kept.content
            );
            for glob in kept.files {
                assert!(
                    page.contains(&format!("`{glob}`")),
                    "docs/simulation.md must have `{glob}`"
                );
            }
        }
        for key in UEVENT_KEYS {
            assert!(
                page.contains(&format!("`{key}`")),
                "docs/simulation.md must have `{key}`"
            );
        }
    }
}
