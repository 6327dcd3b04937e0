//! A driver of either kind that keeps its own record of what it was asked for, which outlives the daemon.

use std::collections::BTreeSet;
use std::io::{Read, Seek, SeekFrom};
use std::sync::{Arc, Mutex};

use native_null::{Device, Operation, Options, Plugin, ScriptedOutcome};
use nodedock_tests::versions::logged_calls;
use nodedock_tests::{Daemon, Root};
use scripted::{Command, POOL, Script};
use tonic::Code;

/// Number of claims that a test may have and that are no command of `scripted`; claims and devices are called `device-N`.
pub(crate) const DEVICES: u32 = 32;

pub(crate) trait Driver: Sized + 'static {
    const NAME: &'static str;
    /// True if the daemon writes CDI files for it.
    const EDITS: bool;

    /// A driver that comes as soon as a daemon runs on the root.
    fn new(root: &Root) -> Self;

    /// Returns the UIDs of the claims that it was called to prepare, regardless of its answer, and not called to unprepare since. No call
    /// may be in flight.
    fn held(&mut self, root: &Root) -> BTreeSet<String>;
}

/// Waits until the driver serves.
pub(crate) async fn serves<D: Driver>(daemon: &Daemon) {
    daemon.until_serving(D::NAME).await;
}

/// Returns the UID of a claim as `nodedock_tests::compose` names it.
fn uid(claim: &str) -> String {
    format!("claim-{claim}")
}

/// The driver `scripted`. All that it can leave is its log.
pub(crate) struct Wasm {
    held: BTreeSet<String>,
    /// Number of bytes of the log that have been read.
    read: u64,
}

impl Driver for Wasm {
    const NAME: &'static str = scripted::NAME;
    const EDITS: bool = true;

    fn new(root: &Root) -> Self {
        root.install_scripted(&Script {
            devices: DEVICES,
            ..Script::default()
        });
        Self {
            held: BTreeSet::new(),
            read: 0,
        }
    }

    fn held(&mut self, root: &Root) -> BTreeSet<String> {
        let log = self.new_lines(root);
        assert!(
            !log.contains("lines of the driver were suppressed"),
            "the record has a gap"
        );
        for call in logged_calls(&log) {
            let (operation, claims) = call.split_once(' ').expect("an operation and claims");
            let claims: BTreeSet<_> = claims.split(',').map(uid).collect();
            match operation {
                "prepare" => self.held.extend(claims),
                "unprepare" => self.held.retain(|held| !claims.contains(held)),
                _ => panic!("no operation in {call}"),
            }
        }
        self.held.clone()
    }
}

impl Wasm {
    fn new_lines(&mut self, root: &Root) -> String {
        let mut log = std::fs::File::open(root.log_path()).expect("a daemon ran");
        let mut text = Vec::new();
        log.seek(SeekFrom::Start(self.read))
            .and_then(|_| log.read_to_end(&mut text))
            .expect("read the log");
        self.read += text.len() as u64;
        String::from_utf8_lossy(&text).into_owned()
    }
}

/// A plugin in the test's own process, which does not die with the daemon.
pub(crate) struct Native {
    held: Arc<Mutex<BTreeSet<String>>>,
    _plugin: Plugin,
}

impl Driver for Native {
    const NAME: &'static str = "scripted-native.nodedock.dev";
    const EDITS: bool = false;

    fn new(root: &Root) -> Self {
        let registry = root.state().join("plugins_registry");
        std::fs::create_dir_all(&registry).expect("the root can be written");
        let options = Options::new(Self::NAME, &registry, &root.path().join("plugins"));
        let held = Arc::<Mutex<BTreeSet<String>>>::default();
        let record = held.clone();
        let script = native_null::Script::new(move |operation, claim| {
            let mut held = record.lock().expect("no holder of the lock panics");
            match operation {
                Operation::Prepare => held.insert(claim.uid.clone()),
                Operation::Unprepare => held.remove(&claim.uid),
            };
            answer(operation, claim)
        });
        let plugin = Plugin::unregistered(options, script).expect("make the driver's socket");
        plugin.register().expect("make the registration socket");
        Self {
            held,
            _plugin: plugin,
        }
    }

    fn held(&mut self, _: &Root) -> BTreeSet<String> {
        self.held
            .lock()
            .expect("no holder of the lock panics")
            .clone()
    }
}

fn answer(operation: Operation, claim: &native_null::Claim) -> ScriptedOutcome {
    let refused = Command::named(&claim.name) == Command::RefusePermanent;
    if refused && operation == Operation::Prepare {
        return ScriptedOutcome::Status(Code::InvalidArgument, "the script refuses it".to_owned());
    }
    ScriptedOutcome::Devices(vec![Device {
        requests: vec!["device-0".to_owned()],
        pool: POOL.to_owned(),
        device: claim.name.clone(),
        cdi_names: vec![format!("{}/script={}", Native::NAME, claim.uid)],
        share_id: None,
    }])
}
