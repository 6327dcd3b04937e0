//! Inputs of the fuzz targets: guests' answers and files, made of bytes and passed through the checks of this module.

mod answers;
mod bytes;

use std::path::Path;
use std::sync::LazyLock;

use crate::DriverInfo;
use crate::calls::edits::Verifier;
use crate::convert::{self, Refusal};
use crate::host_functions::host_files::FilesRoot;
use crate::host_functions::nodes::DevRoot;
use crate::load::admission::{self, Form, LoadError, Surface};
use nodedock_core::hardware::Hardware;
use nodedock_core::sysfs::SysfsRoot;
use nodedock_model::grant::{Capabilities, Effective, Grant};
use nodedock_model::{
    AllocatedDevice, DeviceName, DriverClaim, DriverName, HealthReport, Inventory, ObjectRef,
    PoolName, PreparedClaim, Problem,
};

use self::bytes::Bytes;

/// An answer that the host accepted.
pub enum AcceptedAnswer {
    Description(Box<DriverInfo>),
    Inventory(Inventory),
    Health(HealthReport),
    Refusal(Problem),
    Prepared(Box<Prepared>),
}

pub struct Prepared {
    pub asked: DriverClaim,
    pub claim: PreparedClaim,
    /// The same, verified against the node and a grant of almost everything.
    pub verified: Result<PreparedClaim, Problem>,
}

/// An answer of the kind that the first byte names by its first letter, converted and checked as that of a driver is.
pub fn answer(data: &[u8]) -> Result<AcceptedAnswer, Refusal> {
    let mut bytes = Bytes::new(data);
    match bytes.letter(b"dihrp") {
        b'd' => {
            let info = convert::driver_info(answers::description(&mut bytes));
            info.map(|info| AcceptedAnswer::Description(Box::new(info)))
        }
        b'i' => inventory(&mut bytes).map(AcceptedAnswer::Inventory),
        b'h' => convert::health_report(answers::health(&mut bytes)).map(AcceptedAnswer::Health),
        b'r' => Ok(AcceptedAnswer::Refusal(convert::problem_to_model(
            answers::problem(&mut bytes),
        ))),
        _ => prepared(&mut bytes).map(|prepared| AcceptedAnswer::Prepared(Box::new(prepared))),
    }
}

fn inventory(bytes: &mut Bytes<'_>) -> Result<Inventory, Refusal> {
    let mut inventory = convert::inventory(&driver(), answers::inventory(bytes))?;
    convert::add_scheduling(&driver(), &mut inventory, answers::additions(bytes))?;
    Ok(inventory)
}

fn prepared(bytes: &mut Bytes<'_>) -> Result<Prepared, Refusal> {
    let asked = asked();
    let claim = convert::prepared_claim(&driver(), &asked, answers::prepared_claim(bytes))?;
    let verified = VERIFIER.with(|verifier| verifier.claim(claim.clone()));
    Ok(Prepared {
        asked,
        claim,
        verified,
    })
}

pub fn driver() -> DriverName {
    DriverName::new("gpu.example.com").expect("the name is plain")
}

/// A claim of three devices: of a request, of a subrequest, and a share.
fn asked() -> DriverClaim {
    const PLAIN: &str = "the names are plain";
    let device =
        |request: &str, pool: &str, device: &str, share_id: Option<&str>| AllocatedDevice {
            request: request.to_owned(),
            driver: driver(),
            pool: PoolName::new(pool).expect(PLAIN),
            device: DeviceName::new(device).expect(PLAIN),
            share_id: share_id.map(str::to_owned),
            consumed: Default::default(),
            admin_access: false,
            binding: Default::default(),
        };
    DriverClaim {
        id: ObjectRef::new("ml", "train", "0b1f-5.c_3").expect(PLAIN),
        devices: vec![
            device("gpu", "node", "gpu-0", None),
            device("gpu/big", "node", "gpu-1", None),
            device("nic", "fabric/a", "gpu-0", Some("share")),
        ],
        configs: Vec::new(),
        annotations: Default::default(),
        reserved_for: Vec::new(),
        progress: Vec::new(),
    }
}

/// The node that runs this: its nodes, files and interfaces are looked at, and nothing is opened.
struct Node {
    effective: Effective,
    dev: DevRoot,
    files: FilesRoot,
    sysfs: SysfsRoot,
    hardware: Hardware,
}

static VERIFIER: LazyLock<Node> = LazyLock::new(Node::new);

impl Node {
    fn new() -> Self {
        let one = |text: &str| vec![text.to_owned()];
        let allowed = Capabilities {
            sysfs_read: one("**"),
            sysfs_write: Vec::new(),
            host_files: Vec::new(),
            pci_driver: Vec::new(),
            device_nodes: one("/dev/**"),
            mounts: one("/**"),
            hooks: one("/usr/bin/env"),
            env: one("*"),
            net_devices: one("*"),
        };
        let grant = Grant {
            allowed: allowed.clone(),
            ..Grant::empty()
        };
        Self {
            effective: Effective::new(&allowed, &grant).expect("these are globs"),
            files: FilesRoot::open(Path::new("/")).expect("every Linux has /"),
            dev: DevRoot::open(&Hardware::of_node()).expect("every Linux has /dev"),
            hardware: Hardware::of_node(),
            sysfs: SysfsRoot::open(Path::new("/sys")).expect("every Linux has /sys"),
        }
    }

    fn with<T>(&self, check: impl FnOnce(&Verifier<'_>) -> T) -> T {
        check(&Verifier {
            effective: &self.effective,
            dev: &self.dev,
            files: &self.files,
            sysfs: &self.sysfs,
            hardware: &self.hardware,
        })
    }
}

/// Admits a file, and looks whether what was admitted is a driver, and whether a refusal is one that a person can read.
pub fn admission(file: &[u8]) -> bool {
    let mut surface = Surface::default();
    match admission::admit(file, &mut surface) {
        Ok(component) => check_admitted(&component, &surface),
        Err(error) => check_refused(&error),
    }
}

fn check_admitted(component: &[u8], surface: &Surface) -> bool {
    let has = |interface: &str| {
        let wanted = format!("nodedock:driver/{interface}@0.2.");
        surface.exports.iter().any(|name| name.starts_with(&wanted))
    };
    for interface in ["identity", "discovery", "preparation"] {
        assert!(
            has(interface),
            "admitted without {interface}: {:?}",
            surface.exports
        );
    }
    let known = |name: &String| name.starts_with("nodedock:driver/") || name.starts_with("wasi:");
    assert!(
        surface.imports.iter().all(known),
        "admitted with the imports {:?}",
        surface.imports
    );
    assert!(surface.profile().is_some() && surface.form.is_some());
    wasmparser::validate(component).expect("what was admitted is valid");
    let mut again = Surface::default();
    admission::admit(component, &mut again)
        .expect("what was admitted is admitted again, as a component");
    assert_eq!(again.form, Some(Form::Component));
    assert_eq!(
        (&again.imports, &again.exports),
        (&surface.imports, &surface.exports)
    );
    true
}

fn check_refused(error: &LoadError) -> bool {
    let text = error.to_string();
    assert!(
        !matches!(error, LoadError::Host(_)),
        "the file alone was looked at: {text}"
    );
    assert!(!text.is_empty());
    false
}
