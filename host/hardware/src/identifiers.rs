//! Files of `/sys` and `/proc` that identify a machine, its parts or its users by their names, and the placeholders for their content.
//! Pure. The [`vocabulary`](crate::vocabulary) decides about other files of `/sys`.
//!
//! A value that identifies something is replaced by a placeholder of the same shape: the digits and letters become zeros that end in a
//! number, by the order of paths. A MAC address becomes `02:00:00:00:00:01`, a serial number `00000001`. The same value has the same
//! placeholder everywhere.

use std::cmp::Reverse;
use std::ops::Range;
use std::sync::LazyLock;

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use regex::bytes::Regex;

/// Files whose content identifies something.
#[derive(Clone, Copy, Debug)]
pub struct Identifier {
    /// Globs of paths: `*` matches within a segment, `**` any segments.
    pub files: &'static [&'static str],
    /// Description of their content.
    pub content: &'static str,
}

/// The files whose whole content is replaced: each line by its placeholder, and content that is not text by zeros.
pub const IDENTIFIERS: &[Identifier] = &[
    Identifier {
        files: &[
            "**/*serial",
            "**/*serial[_-]*",
            "**/*serialn*",
            "**/topology/ppin",
            "**/*asset_tag*",
            "**/unique_id",
            "**/*hive_id",
            "**/cid",
            "**/inquiry",
            "**/ata_device/*/id",
            "**/enclosure/*/id",
            "**/enclosure_identifier",
            "**/nfit/id",
            "**/papr/id",
        ],
        content: "serial numbers and asset tags of the machine, its boards, disks, DIMMs, GPUs and USB devices",
    },
    Identifier {
        files: &[
            "**/*uuid*",
            "**/*_guid",
            "**/boot_acl",
            "**/gids/*",
            "**/VMBUS*/**/device_id",
        ],
        content: "UUIDs of machines, file systems and volumes, GUIDs and addresses of InfiniBand ports",
    },
    Identifier {
        files: &[
            "**/*wwid*",
            "**/*wwn*",
            "**/*wwpn*",
            "**/port_name",
            "**/node_name",
            "**/fabric_name",
            "**/sas_address",
            "**/eui",
            "**/nguid",
        ],
        content: "world-wide names of disks, host adapters and their ports",
    },
    Identifier {
        files: &[
            "**/net/*/address",
            "**/net/*/phys_port_id",
            "**/net/*/phys_switch_id",
            "**/*mac-address",
            "**/bridge/*_id",
            "**/brport/designated_*",
            "**/uniq",
        ],
        content: "MAC and Bluetooth addresses",
    },
    Identifier {
        files: &[
            "**/*nqn",
            "**/hostid",
            "**/nvme-fabrics/**/address",
            "**/initiatorname",
            "**/initiator_name",
            "**/targetname",
            "**/persistent_address",
            "**/iscsi_*/**/*address",
            "**/iscsi_*/**/*ipaddr",
            "**/iscsi_*/**/*gateway",
            "**/targetalias",
            "**/bonding/*_target",
            "**/boot_root",
        ],
        content: "names and addresses in storage networks",
    },
    Identifier {
        files: &[
            "**/*password*",
            "**/*username*",
            "**/*secret*",
            "**/*_key",
            "**/domain[0-9]*/**/key",
        ],
        content: "keys and passwords, as of iSCSI, NVMe and Thunderbolt",
    },
    Identifier {
        files: &[
            "**/node_desc",
            "**/symbolic_name",
            "**/ifalias",
            "**/alt_name",
            "**/dm/name",
            "**/loop/backing_file",
        ],
        content: "texts that contain names of hosts, customers, volumes and users",
    },
    Identifier {
        files: &["**/edid"],
        content: "serial numbers of monitors",
    },
];

/// Files that are no identifiers in spite of their names: the kernel gives the name of its controller to a root hub as a serial number.
const NO_IDENTIFIERS: &[&str] = &["**/usb[0-9]*/serial"];

/// Texts that vendors write in place of a serial number.
const NO_VALUE: &[&str] = &[
    "(null)",
    "default string",
    "n/a",
    "na",
    "none",
    "not applicable",
    "not available",
    "not provided",
    "not specified",
    "system serial number",
    "to be filled by o.e.m.",
    "unknown",
];

/// Beginnings that say what kind of identifier follows.
const PREFIXES: &[&str] = &[
    "0x", "naa.", "eui.", "uuid.", "nvme.", "t10.", "GPU-", "MIG-", "LVM-", "CRYPT-", "mpath-",
    "nqn.", "iqn.",
];

/// Bytes of a value from which on it is replaced in other files too.
const SPREAD_BYTES_MIN: usize = 6;
/// Bytes of a value of digits only from which on it is replaced in other files too: shorter ones are mostly something else there.
const SPREAD_DIGITS_MIN: usize = 8;

static FILES: LazyLock<GlobSet> =
    LazyLock::new(|| glob_set(IDENTIFIERS.iter().flat_map(|identifier| identifier.files)));

static OTHER_FILES: LazyLock<GlobSet> = LazyLock::new(|| glob_set(NO_IDENTIFIERS));

/// Builds the globs of a list in this crate.
pub(crate) fn glob_set<'a>(patterns: impl IntoIterator<Item = &'a &'static str>) -> GlobSet {
    let mut globs = GlobSetBuilder::new();
    for pattern in patterns {
        let glob = GlobBuilder::new(pattern).literal_separator(true).build();
        globs.add(glob.expect("the globs of this crate are valid"));
    }
    globs.build().expect("the globs of this crate are valid")
}

/// An address of six to twenty bytes: Ethernet, Bluetooth, EUI-64, InfiniBand.
static HARDWARE_ADDRESS: LazyLock<Regex> =
    LazyLock::new(|| regex(r"(?i-u)\b[0-9a-f]{2}(?::[0-9a-f]{2}){5,19}\b"));

/// A line with a key that names an identifier: `HID_UNIQ=…` of a `uevent` file, `GPU UUID: …` below `/proc/driver`, `unique_id …` of the
/// properties of AMD's GPUs.
static KEYED_VALUE: LazyLock<Regex> = LazyLock::new(|| {
    regex(
        r"(?im-u)^(?:[^=:\n]*(?:serial|uuid|guid|uniq|wwid|wwn|nqn)[^=:\n]*[=:]|(?:unique|hive)_id )[ \t]*([^\n]*[^\s])",
    )
});

fn regex(pattern: &str) -> Regex {
    Regex::new(pattern).expect("the patterns of this file are valid")
}

/// Returns whether the whole content of a file is replaced.
pub(crate) fn is_identifier(path: &str) -> bool {
    FILES.is_match(path) && !OTHER_FILES.is_match(path)
}

/// Returns where a text of any file has identifiers: hardware addresses, and values of keys that name one. In order, and apart.
pub(crate) fn values_in(text: &str) -> Vec<Range<usize>> {
    let keyed = KEYED_VALUE
        .captures_iter(text.as_bytes())
        .filter_map(|found| found.get(1));
    let found = HARDWARE_ADDRESS.find_iter(text.as_bytes()).chain(keyed);
    let mut ranges: Vec<_> = found
        .filter_map(|found| value_of(text, &text[found.range()]))
        .collect();
    ranges.sort_by_key(|range| (range.start, Reverse(range.end)));
    let mut end = 0;
    ranges.retain(|range| {
        let is_apart = range.start >= end;
        end = end.max(range.end);
        is_apart
    });
    ranges
}

/// Returns where each line of a text has its identifier.
pub(crate) fn values_of_lines(text: &str) -> Vec<Range<usize>> {
    text.lines()
        .filter_map(|line| value_of(text, line))
        .collect()
}

/// Returns where the value in a part of a text is, without what surrounds it and what all of its kind begin with.
fn value_of(text: &str, part: &str) -> Option<Range<usize>> {
    let value = core(part);
    let start = value.as_ptr().addr() - text.as_ptr().addr();
    is_value(value).then_some(start..start + value.len())
}

/// Returns whether a text identifies something: it is not empty, a vendor's default, or all zeros or ones.
pub(crate) fn is_value(text: &str) -> bool {
    let core = text.trim().to_ascii_lowercase();
    let mut characters = core
        .chars()
        .filter(|character| character.is_ascii_alphanumeric());
    let first = characters.next();
    let is_filler =
        matches!(first, Some('0' | 'f')) && characters.all(|character| Some(character) == first);
    !core.is_empty() && !is_filler && !NO_VALUE.contains(&core.as_str())
}

/// Returns a value without the beginning that says what it is, and without quotes, braces and the zero byte after some texts.
fn core(value: &str) -> &str {
    let value = value.trim_matches(|character: char| {
        character.is_control() || character.is_whitespace() || matches!(character, '"' | '{' | '}')
    });
    PREFIXES
        .iter()
        .find_map(|prefix| value.strip_prefix(prefix))
        .unwrap_or(value)
}

/// Returns the content of a file as text; `None` if it has bytes that a text does not have.
pub(crate) fn text(content: &[u8]) -> Option<&str> {
    let text = str::from_utf8(content).ok()?;
    (!text.trim_end_matches('\0').contains(|character: char| {
        character.is_control() && !matches!(character, '\n' | '\r' | '\t')
    }) && !text.starts_with('\0'))
    .then_some(text)
}

/// Returns whether a value is so particular that the same text in another file is the same value.
pub(crate) fn is_particular(core: &str) -> bool {
    let bytes_min = if core.contains(|character: char| character.is_ascii_alphabetic()) {
        SPREAD_BYTES_MIN
    } else {
        SPREAD_DIGITS_MIN
    };
    is_hardware_address(core)
        || core.len() >= bytes_min && core.contains(|character: char| character.is_ascii_digit())
}

/// Returns whether a value is a hardware address as a whole.
pub(crate) fn is_hardware_address(core: &str) -> bool {
    HARDWARE_ADDRESS
        .find(core.as_bytes())
        .is_some_and(|found| found.len() == core.len())
}

/// Returns the placeholder of a value: its shape, with a number. That of a hardware address is locally administered.
pub(crate) fn placeholder(core: &str, number: usize) -> String {
    let is_address = is_hardware_address(core);
    let mut rest = number;
    let mut reversed: Vec<char> = Vec::with_capacity(core.len());
    for character in core.chars().rev() {
        if character.is_ascii() && !character.is_ascii_alphanumeric() {
            reversed.push(character);
            continue;
        }
        let base = if is_address { 16 } else { 10 };
        let digit = char::from_digit((rest % base) as u32, base as u32);
        rest /= base;
        reversed.push(digit.unwrap_or('0'));
    }
    if is_address && let [.., second, _] = reversed.as_mut_slice() {
        *second = '2';
    }
    reversed.into_iter().rev().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_identifiers_by_their_names() {
        for path in [
            "/sys/devices/virtual/dmi/id/product_serial",
            "/sys/devices/virtual/dmi/id/product_uuid",
            "/sys/devices/virtual/dmi/id/chassis_asset_tag",
            "/sys/devices/pci0000:00/0000:00:14.0/usb1/1-2/serial",
            "/sys/devices/pci0000:00/0000:00:1d.0/nvme/nvme0/nvme0n1/wwid",
            "/sys/devices/pci0000:00/0000:00:03.0/net/eth0/address",
            "/sys/devices/pci0000:00/0000:00:03.0/infiniband/mlx5_0/node_guid",
            "/sys/devices/pci0000:00/0000:00:03.0/infiniband/mlx5_0/ports/1/gids/0",
            "/sys/firmware/devicetree/base/soc/ethernet/local-mac-address",
        ] {
            assert!(is_identifier(path), "{path}");
        }
        for path in [
            "/sys/devices/pci0000:00/0000:00:03.0/vendor",
            "/sys/devices/virtual/dmi/id/product_name",
            "/sys/bus/pci/slots/1/address",
            "/sys/devices/pci0000:00/0000:00:14.0/usb1/serial",
            "/sys/firmware/devicetree/base/aliases/serial0",
            "/sys/devices/pci0000:00/0000:00:03.0/net/eth0/mtu",
            "/sys/devices/pci0000:00/0000:00:1d.0/nvme/nvme0/model",
        ] {
            assert!(!is_identifier(path), "{path}");
        }
    }

    fn found(text: &str) -> Vec<&str> {
        values_in(text)
            .into_iter()
            .map(|range| &text[range])
            .collect()
    }

    #[test]
    fn values_match_by_shape_or_key() {
        let uevent = "DRIVER=hid\nHID_PHYS=AA:bb:cc:dd:ee:01\nHID_UNIQ=\"s3cret-1\"\nMODALIAS=pci:v00008086d1234\n";
        assert_eq!(found(uevent), ["AA:bb:cc:dd:ee:01", "s3cret-1"]);
        let nvidia =
            "Model: \t\t NVIDIA A100\nGPU UUID:  \t GPU-6f4e1a2b-0000-1111-2222-333344445555\n";
        assert_eq!(found(nvidia), ["6f4e1a2b-0000-1111-2222-333344445555"]);
        assert_eq!(
            found("hive_id 0\nunique_id 9223372036854775807\nvendor_id 4098\n"),
            ["9223372036854775807"]
        );
        assert_eq!(
            found("UNIQ=a 3c:fd:fe:a1:b2:c3 b\n"),
            ["a 3c:fd:fe:a1:b2:c3 b"]
        );
        assert_eq!(
            found("00:00:00:00:00:00\nff:ff:ff:ff:ff:ff\n0000:00:02.0\nserial: None\n"),
            [""; 0]
        );
    }

    #[test]
    fn surrounding_text_is_not_redacted() {
        let text = "naa.5000c500a1b2c3d4\n\nNone\n {f8615163-df3e}\0";
        let values: Vec<_> = values_of_lines(text)
            .into_iter()
            .map(|range| &text[range])
            .collect();
        assert_eq!(values, ["5000c500a1b2c3d4", "f8615163-df3e"]);
    }

    #[test]
    fn defaults_of_vendors_are_no_values() {
        for text in [
            "",
            " ",
            "None",
            "Not Specified",
            "0000000000000000",
            "00000000-0000-0000-0000-000000000000",
            "0",
        ] {
            assert!(!is_value(text), "{text:?}");
        }
        for text in ["hunter", "5000c500a1b2c3d4", "f0"] {
            assert!(is_value(text), "{text:?}");
        }
    }

    #[test]
    fn control_characters_make_content_binary() {
        assert_eq!(text(b"a\tb\n\0"), Some("a\tb\n\0"));
        for binary in [&b"\x02\x42ac\x11\0"[..], b"a\0b", b"\0", b"\xff"] {
            assert_eq!(text(binary), None, "{binary:?}");
        }
    }

    #[test]
    fn placeholder_has_shape_of_value() {
        for (value, number, expected) in [
            ("3c:fd:fe:a1:b2:c3", 1, "02:00:00:00:00:01"),
            ("3c:fd:fe:a1:b2:c3", 300, "02:00:00:00:01:2c"),
            ("S3EWNX0K123456", 12, "00000000000012"),
            (
                "fe80:0000:0000:0000:0002:c903:0029:2ad6",
                7,
                "0000:0000:0000:0000:0000:0000:0000:0007",
            ),
            (
                "4c4c4544-0042-3510-8052-b4c04f564432",
                2,
                "00000000-0000-0000-0000-000000000002",
            ),
            ("aé b", 1, "00 1"),
        ] {
            assert_eq!(placeholder(value, number), expected);
        }
    }

    #[test]
    fn the_page_lists_every_file() {
        let page = std::fs::read_to_string(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../docs/simulation.md"
        ))
        .unwrap();
        for identifier in IDENTIFIERS {
            for glob in identifier.files {
                assert!(
                    page.contains(&format!("`{glob}`")),
                    "docs/simulation.md must have `{glob}`"
                );
            }
            assert!(
                page.contains(identifier.content),
                "docs/simulation.md must have: {}",
                identifier.content
            );
        }
    }
}
