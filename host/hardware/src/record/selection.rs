//! Selection of the parts of `/sys`, `/dev` and `/proc` for a recording. Pure.
//!
//! Only the trees in [`TREES`] are walked. Within them a file is opened unless a rule leaves it out: it is for writing, it is memory of a
//! device, reading it has an effect, or it holds a secret that no driver needs.

use std::sync::LazyLock;

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

/// The directories and files that a recording begins with.
pub(super) const TREES: &[&str] = &[
    "/sys/block",
    "/sys/bus",
    "/sys/class",
    "/sys/dev",
    "/sys/devices",
    "/sys/firmware/devicetree",
    "/sys/kernel/iommu_groups",
    "/sys/kernel/mm/hugepages",
    "/sys/module",
    "/dev",
    "/proc/cpuinfo",
    "/proc/devices",
    "/proc/driver",
    "/proc/meminfo",
    "/proc/misc",
    "/proc/sys/kernel/osrelease",
];

/// Files and directories that are left out, with the reason.
const LEFT_OUT: &[(&str, &[&str])] = &[
    (
        "memory of a device",
        &[
            "**/rom",
            "**/resource[0-9]*",
            "**/legacy_io",
            "**/legacy_mem",
            "**/nvmem",
            "**/*eeprom",
            "**/vpd",
            "**/vpd_pg*",
            "**/vbios*",
        ],
    ),
    (
        "dumps of memory, and addresses of the kernel",
        &["**/devcoredump", "**/devcd[0-9]*", "**/crash_notes*"],
    ),
    (
        "commands to firmware or to a TPM",
        &[
            "**/firmware/*/data",
            "**/firmware/*/loading",
            "**/ppi",
            "**/pcrs",
            "**/pcr-*",
            "**/pubek",
        ],
    ),
    ("settings of the firmware", &["**/firmware-attributes/*"]),
    (
        "images in storage networks",
        &["/sys/devices/rbd", "/sys/bus/rbd/*"],
    ),
    ("streams", &["**/trace_pipe", "**/tracing"]),
    (
        "boot arguments and seeds",
        &["/sys/firmware/devicetree/base/chosen"],
    ),
    (
        "blocks of memory",
        &[
            "/sys/devices/system/memory/memory[0-9]*",
            "**/node/node[0-9]*/memory[0-9]*",
            "/sys/bus/memory/devices/*",
        ],
    ),
    (
        "parameters and sections of kernel modules",
        &["/sys/module/*/{parameters,sections,notes}"],
    ),
    (
        "nodes of terminals, and names of volumes",
        &[
            "/dev/{pts,shm,mqueue,hugepages}",
            "/dev/mapper/*",
            "/dev/disk",
        ],
    ),
];

/// Links of `/dev` that are kept: their names say where a device is, and not which one.
const DEV_LINKS: &str = "/dev/**/by-path/*";

/// Bytes of a file of `/sys`: the kernel gives a text 4 KiB, and tables of some devices more.
const SYS_FILE_BYTES_MAX: usize = 64 << 10;
/// Bytes of a file of `/proc`: `cpuinfo` has some 1,500 for each processor.
const PROC_FILE_BYTES_MAX: usize = 4 << 20;
/// Bytes of the configuration space of a PCI function: what all have, and the capabilities. The extended space has serial numbers.
const PCI_CONFIG_BYTES: usize = 256;
/// Permission to read, of any class of users.
const READABLE: u32 = 0o444;

/// The part of a file that is recorded.
#[derive(Debug, PartialEq)]
pub(super) enum Choice {
    /// All of it, if it has no more bytes.
    Whole(usize),
    /// The first bytes.
    Head(usize),
    /// Nothing, with the reason.
    None(&'static str),
}

struct Rules {
    globs: GlobSet,
    /// Reasons by the index of the glob.
    reasons: Vec<&'static str>,
}

static RULES: LazyLock<Rules> = LazyLock::new(|| {
    let mut globs = GlobSetBuilder::new();
    let mut reasons = Vec::new();
    for (reason, patterns) in LEFT_OUT {
        for pattern in *patterns {
            globs.add(glob(pattern));
            reasons.push(*reason);
        }
    }
    Rules {
        globs: globs.build().expect("the globs of this file are valid"),
        reasons,
    }
});

static KEPT_LINKS: LazyLock<globset::GlobMatcher> =
    LazyLock::new(|| glob(DEV_LINKS).compile_matcher());

fn glob(pattern: &str) -> globset::Glob {
    GlobBuilder::new(pattern)
        .literal_separator(true)
        .build()
        .expect("the globs of this file are valid")
}

/// Returns why an entry and everything in it is left out.
pub(super) fn left_out(path: &str) -> Option<&'static str> {
    RULES
        .globs
        .matches(path)
        .first()
        .map(|index| RULES.reasons[*index])
}

/// Returns whether a link is kept, or why not.
pub(super) fn keeps_link(path: &str) -> Result<(), &'static str> {
    if path.starts_with("/dev/") && !KEPT_LINKS.is_match(path) {
        Err("links in /dev")
    } else {
        Ok(())
    }
}

/// Returns how much of a regular file with this mode is recorded.
pub(super) fn content(path: &str, mode: u32) -> Choice {
    if mode & READABLE == 0 {
        return Choice::None("files for writing");
    }
    if path.starts_with("/dev/") {
        return Choice::None("files in /dev");
    }
    if path.starts_with("/sys/module/") && !path.ends_with("/version") {
        return Choice::None("state of kernel modules");
    }
    if path.starts_with("/proc/") {
        return Choice::Whole(PROC_FILE_BYTES_MAX);
    }
    if path.ends_with("/config") {
        Choice::Head(PCI_CONFIG_BYTES)
    } else {
        Choice::Whole(SYS_FILE_BYTES_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dangerous_files_are_left_out() {
        let function = "/sys/devices/pci0000:00/0000:00:02.0";
        for name in [
            "rom",
            "resource0",
            "resource2_wc",
            "vpd",
            "devcoredump",
            "trace_pipe",
            "tpm/tpm0/pcrs",
        ] {
            assert!(left_out(&format!("{function}/{name}")).is_some(), "{name}");
        }
        for name in [
            "resource",
            "vendor",
            "config",
            "firmware_node",
            "net/eth0/address",
        ] {
            assert_eq!(left_out(&format!("{function}/{name}")), None, "{name}");
        }
        for name in ["remove", "reset", "rescan"] {
            assert_eq!(
                content(&format!("{function}/{name}"), 0o100_200),
                Choice::None("files for writing")
            );
        }
        assert_eq!(
            content(&format!("{function}/config"), 0o100_644),
            Choice::Head(256)
        );
        assert!(left_out("/sys/module/nvme/parameters").is_some());
        assert_eq!(
            content("/sys/module/nvme/version", 0o100_444),
            Choice::Whole(SYS_FILE_BYTES_MAX)
        );
        assert_eq!(
            content("/sys/module/nvme/refcnt", 0o100_444),
            Choice::None("state of kernel modules")
        );
    }

    #[test]
    fn dev_links_by_location_are_kept() {
        assert_eq!(keeps_link("/dev/dri/by-path/pci-0000:00:02.0-card"), Ok(()));
        assert_eq!(keeps_link("/sys/class/drm/card0"), Ok(()));
        for path in ["/dev/serial/by-id/usb-FTDI_A50285BI", "/dev/root"] {
            assert!(keeps_link(path).is_err(), "{path}");
        }
        assert!(left_out("/dev/mapper/host--vg-root").is_some());
        assert!(left_out("/dev/disk").is_some());
    }

    #[test]
    fn only_allowed_trees_are_walked() {
        for tree in TREES {
            assert_eq!(left_out(tree), None, "{tree}");
        }
        for secret in [
            "/sys/firmware/acpi",
            "/sys/firmware/dmi",
            "/sys/kernel/debug",
            "/sys/kernel/security",
            "/sys/fs",
            "/proc/cmdline",
        ] {
            assert!(
                !TREES.iter().any(|tree| secret.starts_with(tree)),
                "{secret}"
            );
        }
    }
}
