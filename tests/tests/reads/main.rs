//! Discoveries of the example drivers beside renames on the machine, and with a system call that fails: the inventory is complete, or the
//! call ends with a problem. No device is missing because a read failed.
//!
//! A program of its own, because the calls that fail are those of the whole process.

mod machine;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use machine::Machines;
use nodedock_base::failpoint::{fail_system_call, system_calls};
use nodedock_core::driver::Published;
use nodedock_core::driver::values::NoJournal;
use nodedock_core::hardware::Hardware;
use nodedock_core::records::SharedClaimTable;
use nodedock_model::Problem;
use nodedock_model::grant::Grant;
use nodedock_tests::drivers::{Form, side_file, wasm};
use nodedock_tests::golden::settings;
use nodedock_wasm::{DriverFile, Trigger, WasmDriver, WasmHost, WasmSettings, driver_config};
use rustix::io::Errno;
use tokio::sync::Mutex;

/// The tests share what fails.
static ALONE: Mutex<()> = Mutex::const_new(());

/// Example drivers, with configs that offer what the machine has, and the devices that they then have.
const DRIVERS: [(&str, &str, usize); 10] = [
    ("accel", "pools: [{name: all}]", 2),
    (
        "block",
        "pools: [{name: disks, select: [{wwid: eui.0025385b21b0c7e1}]}]",
        1,
    ),
    ("camera", "pools: [{name: all}]", 2),
    (
        "device-nodes",
        "pools: [{name: all, paths: [\"/dev/dri/*\", \"/dev/ttyUSB*\"]}]",
        2,
    ),
    ("gpu", "{}", 2),
    ("pci", "{}", 4),
    (
        "sriov",
        "pools: [{name: vf, select: [{addresses: [\"*\"]}], vfs: 2, mode: vfio}]",
        2,
    ),
    (
        "udev",
        "pools: [{name: serial, kind: serial}, {name: usb, kind: usb}]",
        4,
    ),
    (
        "vfio-pci",
        "pools: [{name: all, select: [{addresses: [\"*\"]}]}]",
        4,
    ),
    ("golden", "{}", 2),
];

const DISCOVERIES: usize = 200;

/// Renames a file to and fro until it is dropped: openat2(2) of any other process fails with `EAGAIN` meanwhile, where a path has `..`.
struct Renames {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Renames {
    fn start() -> Self {
        let (is_over, directory) = (
            Arc::new(AtomicBool::new(false)),
            tempfile::tempdir().unwrap(),
        );
        let over = Arc::clone(&is_over);
        let rename = move || {
            let [one, other] = ["one", "other"].map(|name| directory.path().join(name));
            std::fs::write(&one, "").unwrap();
            while !over.load(Ordering::Relaxed) {
                std::fs::rename(&one, &other).unwrap();
                std::fs::rename(&other, &one).unwrap();
            }
        };
        Self {
            is_over,
            thread: Some(std::thread::spawn(rename)),
        }
    }
}

impl Drop for Renames {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread
            .take()
            .expect("it is dropped once")
            .join()
            .expect("the renames succeed");
    }
}

async fn load(machine: &Path, name: &str, config: &str) -> WasmDriver {
    let settings = WasmSettings {
        hardware: Hardware::simulated(machine),
        ..settings(None)
    };
    let host = WasmHost::new(
        settings,
        Arc::new(SharedClaimTable::default()),
        Arc::new(NoJournal),
    );
    let file = DriverFile {
        name: format!("{name}.wasm"),
        bytes: wasm(name, Form::Core).into(),
    };
    let grant = Grant::parse(&side_file(name, "grant")).expect("the example's grant");
    let config = driver_config(config).expect("a config");
    let driver = host
        .expect("set up the sandbox")
        .load(file, grant, Some(config))
        .await
        .unwrap();
    assert_eq!(driver.missing_grants(), Vec::<String>::new(), "{name}");
    driver
}

async fn discover(driver: &WasmDriver) -> Result<Published, Problem> {
    // A driver that fails repeatedly is quarantined.
    driver.containment().resume();
    driver.publish(&driver.look_call(), Trigger::Load).await
}

/// A driver on the machine, and what it finds there.
async fn scene(
    machine: &Path,
    name: &str,
    config: &str,
    devices: usize,
) -> (WasmDriver, Published) {
    let driver = load(machine, name, config).await;
    let found = discover(&driver).await.unwrap();
    assert_eq!(
        found.inventory.device_count(),
        devices,
        "{name}: {:#?}",
        found.inventory
    );
    (driver, found)
}

#[tokio::test]
async fn renames_leave_out_no_device() {
    let _alone = ALONE.lock().await;
    let machines = Machines::make();
    for (name, config, devices) in DRIVERS {
        let (driver, complete) = scene(machines.of(name), name, config, devices).await;
        let _renames = Renames::start();
        for _ in 0..DISCOVERIES {
            assert_eq!(discover(&driver).await.as_ref(), Ok(&complete), "{name}");
        }
    }
}

#[tokio::test]
async fn failed_system_call_hides_no_device() {
    let _alone = ALONE.lock().await;
    let machines = Machines::make();
    for (name, config, devices) in DRIVERS {
        let (driver, complete) = scene(machines.of(name), name, config, devices).await;
        for errno in [
            Errno::AGAIN,
            Errno::INTR,
            Errno::IO,
            Errno::MFILE,
            Errno::NOMEM,
        ] {
            let mut problems = 0;
            for number in 0.. {
                fail_system_call(number, errno);
                let found = discover(&driver).await;
                let has_failed = system_calls() > number;
                match found {
                    // Readings fail alone.
                    Ok(found) if found.telemetry.problem.is_some() => {
                        problems += 1;
                        assert!(
                            !found.differs(&complete),
                            "{name}: {errno} of call {number}"
                        );
                    }
                    Ok(found) => assert_eq!(found, complete, "{name}: {errno} of call {number}"),
                    Err(_) => problems += 1,
                }
                if !has_failed {
                    break;
                }
            }
            match errno {
                Errno::INTR => assert_eq!(problems, 0, "{name}: an interrupted call is repeated"),
                // A driver may read a device's file that says EAGAIN itself.
                Errno::AGAIN => {}
                _ => assert!(problems > 0, "{name}: {errno} is a problem"),
            }
        }
    }
}
