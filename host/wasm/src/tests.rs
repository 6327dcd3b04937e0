mod ceiling;
mod conduct;
mod contract;
mod fields;
pub(crate) mod guest;
mod hostile;
mod limits;
mod loading;
mod parameters;
mod readers;
mod replaying;
mod running;
mod writing;

use crate::*;
use guest::Guest;
use nodedock_core::driver::values::NoJournal;
use nodedock_core::records::SharedClaimTable;
use nodedock_core::standard_attributes::NumaNodeForm;
use nodedock_model::ObjectRef;

/// A node of a test: an empty `/sys` and `/dev`, and a cache.
pub(crate) struct Stage {
    pub(crate) directory: tempfile::TempDir,
    pub(crate) host: Arc<WasmHost>,
}

impl Stage {
    pub(crate) fn new() -> Self {
        Self::on(tempfile::tempdir().unwrap(), false)
    }

    fn on(directory: tempfile::TempDir, cached: bool) -> Self {
        Self::keeping(directory, cached, Arc::new(NoJournal))
    }

    fn keeping(directory: tempfile::TempDir, cached: bool, journal: Arc<dyn Journal>) -> Self {
        Self::recording(directory, cached, journal, Recordings::default())
    }

    fn recording(
        directory: tempfile::TempDir,
        cached: bool,
        journal: Arc<dyn Journal>,
        recordings: Recordings,
    ) -> Self {
        for part in ["sys", "dev"] {
            std::fs::create_dir_all(directory.path().join(part)).unwrap();
        }
        let settings = WasmSettings {
            cache: cached.then(|| CachePaths::inside(directory.path())),
            compiler: Compiler::InProcess,
            hardware: Hardware::in_directory(directory.path())
                .with_own_directories(vec![directory.path().join("opt/dock/var/lib/nodedock")]),
            node: NodeFacts {
                name: "node-1".into(),
                boot_id: "boot-1".into(),
            },
            numa_node_form: NumaNodeForm::default(),
            recordings,
        };
        Self {
            directory,
            host: WasmHost::new(settings, Arc::new(SharedClaimTable::default()), journal).unwrap(),
        }
    }

    async fn try_load(
        &self,
        bytes: impl Into<Bytes>,
        grant: &str,
    ) -> Result<WasmDriver, LoadError> {
        let file = DriverFile {
            name: "tiny.wasm".into(),
            bytes: bytes.into(),
        };
        let head = "apiVersion: nodedock.dev/v1\nkind: DriverGrant\n";
        self.host
            .load(file, Grant::parse(&format!("{head}{grant}")).unwrap(), None)
            .await
    }

    pub(crate) async fn load(&self, guest: &Guest) -> WasmDriver {
        self.try_load(guest.module(), "").await.unwrap()
    }

    /// Why it is refused.
    async fn refusal(&self, bytes: impl Into<Bytes>) -> LoadError {
        self.try_load(bytes, "").await.unwrap_err()
    }
}

/// The number of calls that were started.
fn calls(driver: &WasmDriver) -> u64 {
    let started = Outcome::ALL
        .iter()
        .filter(|outcome| **outcome != Outcome::Quarantined);
    started.map(|outcome| driver.stats().ended(*outcome)).sum()
}

fn a_call() -> nodedock_core::driver::Call {
    nodedock_core::driver::Call {
        request_id: "r-1".into(),
        deadline: Duration::from_secs(10),
    }
}

pub(crate) fn a_claim(uid: &str) -> nodedock_model::DriverClaim {
    nodedock_model::DriverClaim {
        id: ObjectRef::new("default", "claim", uid).unwrap(),
        devices: Vec::new(),
        configs: Vec::new(),
        annotations: BTreeMap::new(),
        reserved_for: Vec::new(),
        progress: Vec::new(),
    }
}
