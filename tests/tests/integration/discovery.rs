//! Devices that come and go while the daemon runs, as the kernel tells.

use std::fs::File;
use std::path::{Path, PathBuf};

use nodedock_tests::Daemon;
use nodedock_tests::drivers::{DEVICE_NODES, DEVICE_NODES_NAME, Form, side_file, wasm};
use nodedock_tests::machine::{or_skip, skip};
use rustix::fs::{CWD, FileType, makedev, mknodat};
use rustix::ioctl::{IntegerSetter, Opcode, ioctl};

const LOOP_CTL_ADD: Opcode = 0x4C80;
const LOOP_CTL_REMOVE: Opcode = 0x4C81;
const LOOP_MAJOR: u32 = 7;

/// A loop device of ours; removed when dropped.
struct LoopDevice {
    control: File,
    number: usize,
}

impl LoopDevice {
    /// Adds one with an unused number. The error says in one line why it cannot be.
    fn add() -> Result<Self, String> {
        let control = File::options()
            .read(true)
            .write(true)
            .open("/dev/loop-control");
        let control = control.map_err(|error| format!("/dev/loop-control: {error}"))?;
        let mut numbers = Self::numbers();
        let number = numbers
            .find(|number| !path(*number).exists())
            .ok_or("no number is free")?;
        // SAFETY: LOOP_CTL_ADD takes its argument by value and touches no memory of ours.
        let added = unsafe { ioctl(&control, IntegerSetter::<LOOP_CTL_ADD>::new_usize(number)) };
        added.map_err(|error| format!("add a loop device: {error}"))?;
        Ok(Self { control, number })
    }

    /// Numbers of which one is used.
    fn numbers() -> std::ops::Range<usize> {
        let first = 300 + std::process::id() as usize % 500;
        first..first + 8
    }

    fn remove(&self) -> rustix::io::Result<()> {
        // SAFETY: LOOP_CTL_REMOVE takes its argument by value and touches no memory of ours.
        unsafe {
            ioctl(
                &self.control,
                IntegerSetter::<LOOP_CTL_REMOVE>::new_usize(self.number),
            )
        }
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // The test itself may have removed it.
        let _ = self.remove();
    }
}

fn path(number: usize) -> PathBuf {
    Path::new("/dev").join(format!("loop{number}"))
}

/// A node that is removed when dropped.
struct Node(PathBuf);

impl Drop for Node {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The driver, with a grant that names these block devices by their exact paths.
async fn with_nodes(numbers: impl Iterator<Item = usize>) -> Daemon {
    let daemon = Daemon::start().await;
    let exact: String = numbers
        .map(|number| format!("  - {}\n", path(number).display()))
        .collect();
    let grant = side_file(DEVICE_NODES, "grant")
        .replace("deviceNodes:\n", &format!("deviceNodes:\n{exact}"));
    daemon.drop_in(&format!("{DEVICE_NODES}.grant.yaml"), grant);
    daemon.drop_in(
        &format!("{DEVICE_NODES}.config.yaml"),
        side_file(DEVICE_NODES, "config"),
    );
    daemon.drop_in(
        &format!("{DEVICE_NODES}.wasm"),
        wasm(DEVICE_NODES, Form::Core),
    );
    daemon.until_serving(DEVICE_NODES_NAME).await;
    daemon
}

#[tokio::test]
async fn kernel_device_appears_and_disappears() {
    let daemon = with_nodes(LoopDevice::numbers()).await;
    let Some(device) = or_skip("a loop device that comes and goes", LoopDevice::add()) else {
        return;
    };
    let name = format!("loop{}", device.number);
    if !path(device.number).exists() {
        return skip(
            "a loop device that comes and goes",
            "nothing makes nodes in /dev here",
        );
    }
    daemon.until_device("loop", &name, true).await;
    let shown = daemon
        .cli(&["get", "devices", &format!("loop/{name}"), "-o", "json"])
        .await
        .json();
    assert_eq!(
        shown[0]["attributes"]["path"],
        format!("/dev/{name}"),
        "{shown}"
    );
    assert_eq!(shown[0]["attributes"]["major"], 7, "{shown}");
    device.remove().unwrap();
    daemon.until_device("loop", &name, false).await;
    daemon
        .cli(&["get", "devices", &format!("loop/{name}")])
        .await
        .failed(1);
}

#[tokio::test]
async fn later_created_node_appears_and_disappears() {
    let number = 900 + std::process::id() % 90;
    let daemon = with_nodes([number as usize].into_iter()).await;
    let node = Node(path(number as usize));
    let device = makedev(LOOP_MAJOR, number);
    if let Err(error) = mknodat(CWD, &node.0, FileType::BlockDevice, 0o600.into(), device) {
        return skip("a device node", &error.to_string());
    }
    let name = format!("loop{number}");
    daemon.until_device("loop", &name, true).await;
    drop(node);
    daemon.until_device("loop", &name, false).await;
}
