//! The nodes that the driver requests, and the drivers that have others.

use nodedock_sdk::matches_wildcards;

/// Nodes that are useful in containers. An operator who needs another node builds a driver with another list: the binary determines
/// what the driver can request, and the grant file what it gets.
pub(crate) const DEVICE_NODES: [&str; 27] = [
    "/dev/accel/*",
    "/dev/bus/usb/*/*",
    "/dev/cuse",
    "/dev/dri/*",
    "/dev/fuse",
    "/dev/gpiochip*",
    "/dev/hidraw*",
    "/dev/hwrng",
    "/dev/i2c-*",
    "/dev/infiniband/*",
    "/dev/input/event*",
    "/dev/kvm",
    "/dev/loop*",
    "/dev/media*",
    "/dev/net/tun",
    "/dev/ptp*",
    "/dev/rtc*",
    "/dev/snd/*",
    "/dev/spidev*",
    "/dev/tpmrm*",
    "/dev/ttyACM*",
    "/dev/ttyUSB*",
    "/dev/uinput",
    "/dev/v4l-subdev*",
    "/dev/vfio/*",
    "/dev/vhost-*",
    "/dev/video*",
];

/// Nodes that other example drivers offer, with names that stay the same.
const ELSEWHERE: [(&str, &str); 15] = [
    ("/dev/apex_", "accel"),
    ("/dev/hailo", "accel"),
    ("/dev/disk/", "block"),
    ("/dev/mmcblk", "block"),
    ("/dev/nvme", "block"),
    ("/dev/sd", "block"),
    ("/dev/vd", "block"),
    ("/dev/xvd", "block"),
    ("/dev/kfd", "gpu"),
    ("/dev/nvidia", "gpu"),
    ("/dev/mei", "pci"),
    ("/dev/input/", "udev"),
    ("/dev/ipoctal", "udev"),
    ("/dev/noz", "udev"),
    ("/dev/tty", "udev"),
];

/// Returns what is before the first wildcard.
fn literal(glob: &str) -> &str {
    glob.split(['*', '?', '[', '{']).next().unwrap_or(glob)
}

/// Returns whether the driver may request a node that the glob matches: for a path exactly, for a glob by what is before the first wildcard, since
/// the host decides whether a grant covers a glob.
pub(crate) fn is_requested(glob: &str) -> bool {
    let prefix = literal(glob);
    if prefix.len() < glob.len() {
        return DEVICE_NODES
            .map(literal)
            .iter()
            .any(|known| known.starts_with(prefix) || prefix.starts_with(known));
    }
    DEVICE_NODES.iter().any(|known| {
        known.split('/').count() == glob.split('/').count()
            && known
                .split('/')
                .zip(glob.split('/'))
                .all(|(known, segment)| matches_wildcards(known, segment))
    })
}

/// Returns why a glob of the config has no nodes, and which example driver has them.
pub(crate) fn not_requested(glob: &str) -> String {
    let prefix = literal(glob);
    let other = ELSEWHERE.iter().find(|(known, _)| {
        prefix.starts_with(known) || (known.starts_with(prefix) && prefix.len() > "/dev/".len())
    });
    let hint = match other {
        Some((_, driver)) => format!("the driver {driver} offers such nodes"),
        None => "no other example driver offers such nodes".to_owned(),
    };
    format!("device-nodes does not request {glob} (DEVICE_NODES in src/nodes.rs): {hint}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listed_paths_and_globs_are_requested() {
        for glob in [
            "/dev/fuse",
            "/dev/bus/usb/001/002",
            "/dev/loop[0-9]*",
            "/dev/{fuse,kvm}",
            "/dev/tty*",
        ] {
            assert!(is_requested(glob), "{glob}");
        }
        for glob in ["/dev/sda", "/dev/bus/usb/001", "/dev/fuse/x", "/dev/nvme*"] {
            assert!(!is_requested(glob), "{glob}");
        }
    }

    #[test]
    fn message_names_the_driver_of_nodes() {
        for (glob, driver) in [
            ("/dev/sda", "driver block"),
            ("/dev/nvme*n1", "driver block"),
            ("/dev/ttyXRUSB0", "driver udev"),
            ("/dev/t*", "driver udev"),
            ("/dev/apex_0", "driver accel"),
            ("/dev/mem", "no other example driver"),
            ("/dev/*", "no other example driver"),
        ] {
            assert!(not_requested(glob).contains(driver), "{glob}");
        }
    }
}
