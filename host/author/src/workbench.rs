//! A driver under test, without a daemon: its files, and the machine on which it is called.
//!
//! Given a driver's file, grant, config and a recorded machine, it calls the driver as a daemon does. Claims and the values that the
//! driver writes below `/sys` are in memory. A recorded machine is a copy, which the driver may change; on this machine nothing is
//! written.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use async_trait::async_trait;
use clap::Args;
use parking_lot::Mutex;
use serde::Serialize;

use super::{beside, grant_beside, read, read_text};
use nodedock_base::locks::{LockGuard, Locks};
use nodedock_core::driver::values::{Journal, NoJournal, Write};
use nodedock_core::driver::{Call, ClaimDriver, NodeFacts};
use nodedock_core::hardware::Hardware;
use nodedock_core::recording::{Line, RecordedCall, Recordings};
use nodedock_core::records::SharedClaimTable;
use nodedock_core::standard_attributes::NumaNodeForm;
use nodedock_model::grant::Grant;
use nodedock_model::{
    AllocatedDevice, ClaimRecord, ClaimState, DeviceName, DriverKind, DriverName, DriverPart,
    ObjectRef, PoolName, PreparedBy, PreparedClaim, Problem, ProblemCode, Uid, limit,
};
use nodedock_wasm::{
    CachePaths, Compiler, DriverFile, WasmDriver, WasmHost, WasmSettings, driver_config,
};
use nodedockd::app::hardware;
use nodedockd::telemetry::{self, LogFormat};

/// The node and its boot, as the driver sees them: the same at each run.
const NODE: &str = "node-1";
pub(super) const BOOT: &str = "00000000-0000-4000-8000-000000000001";
/// Namespace and request of the claims.
const NAMESPACE: &str = "default";
const REQUEST: &str = "device";
/// Maximum size of the recordings of calls that a tool inspects.
const RECORDING_BYTES_MAX: u64 = 256 << 20;

#[derive(Args)]
pub(super) struct SubjectArgs {
    /// The driver, NAME.wasm
    pub(super) file: PathBuf,
    /// Its grant [default: NAME.grant.yaml beside NAME.wasm, if it exists]
    #[arg(long, value_name = "FILE")]
    pub(super) grant: Option<PathBuf>,
    /// Its config [default: NAME.config.yaml beside NAME.wasm, if it exists]
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
}

/// A driver's files.
pub(super) struct Subject {
    pub(super) file: DriverFile,
    pub(super) grant: Grant,
    pub(super) grant_path: Option<PathBuf>,
    /// JSON text.
    pub(super) config: Option<String>,
}

impl SubjectArgs {
    /// The file of the config, if there is one.
    pub(super) fn config_path(&self) -> Result<Option<PathBuf>> {
        self.config
            .clone()
            .map_or_else(|| beside(&self.file, "config.yaml"), |path| Ok(Some(path)))
    }

    pub(super) fn read(&self) -> Result<Subject> {
        let bytes = read(&self.file, limit::DRIVER_FILE_BYTES_MAX)?;
        let name = self
            .file
            .file_name()
            .unwrap_or(self.file.as_os_str())
            .to_string_lossy()
            .into_owned();
        let (grant, grant_path) = grant_beside(&self.file, self.grant.as_deref())?;
        let config = match self.config_path()? {
            Some(path) => {
                let text = read_text(&path)?;
                Some(driver_config(&text).with_context(|| format!("config {}", path.display()))?)
            }
            None => None,
        };
        Ok(Subject {
            file: DriverFile {
                name,
                bytes: bytes.into(),
            },
            grant,
            grant_path,
            config,
        })
    }
}

/// The machine and the sandbox on it.
pub(super) struct Workbench {
    pub(super) host: Arc<WasmHost>,
    /// Recordings of calls that a tool inspects.
    pub(super) recordings: Recordings,
    claims: Arc<SharedClaimTable>,
    /// `None`: on this machine nothing may be written.
    values: Option<Arc<Values>>,
    /// Directory of the recorded machine and of compiled code.
    _directory: tempfile::TempDir,
}

impl Workbench {
    /// Makes the machine of a snapshot; without one, the driver sees this machine.
    pub(super) fn new(snapshot: Option<&Path>) -> Result<Self> {
        // An author sees why a driver trapped; NODEDOCK_LOG=info shows all lines of the driver's log.
        telemetry::init_with(LogFormat::Text, "warn");
        let directory = tempfile::tempdir().context("make a directory for the machine")?;
        let hardware = match snapshot {
            Some(snapshot) => {
                hardware::simulated(snapshot, &directory.path().join("hardware"), BOOT)?
            }
            None => Hardware::of_node(),
        };
        let claims = Arc::<SharedClaimTable>::default();
        let values = snapshot.map(|_| Arc::<Values>::default());
        let journal: Arc<dyn Journal> = match &values {
            Some(values) => Arc::clone(values) as _,
            None => Arc::new(NoJournal),
        };
        let recordings = Recordings::start(
            &directory.path().join("recordings"),
            [],
            RECORDING_BYTES_MAX,
        )?;
        let settings = WasmSettings {
            cache: Some(CachePaths::inside(directory.path())),
            compiler: Compiler::this_program(),
            hardware,
            node: facts(BOOT),
            numa_node_form: NumaNodeForm::default(),
            recordings: recordings.clone(),
        };
        let host = WasmHost::new(settings, Arc::clone(&claims) as _, journal)
            .context("set up the sandbox")?;
        Ok(Self {
            host,
            recordings,
            claims,
            values,
            _directory: directory,
        })
    }

    /// The recorded calls of a driver.
    ///
    /// # Errors
    ///
    /// A call was too large to be recorded.
    pub(super) async fn recorded(&self, driver: &str) -> Result<Vec<RecordedCall>> {
        let recorded = self.recordings.read(driver).await?;
        anyhow::ensure!(
            recorded.lost == 0,
            "{} calls are not recorded",
            recorded.lost
        );
        let mut calls = Vec::new();
        for segment in recorded.segments {
            let text = segment.read().context("read the recording")?;
            for line in text
                .split(|byte| *byte == b'\n')
                .filter(|line| !line.is_empty())
            {
                match serde_json::from_slice(line).context("read the recording")? {
                    Line::Call(call) => calls.push(call),
                    Line::Lost(lost) => anyhow::bail!("{lost} calls are not recorded"),
                    Line::Revision(_) | Line::File(_) | Line::End(_) => {}
                }
            }
        }
        Ok(calls)
    }

    /// Loads a driver that may serve: with everything granted that it requests, and a config that it accepts.
    pub(super) async fn load(&self, subject: &Subject) -> Result<WasmDriver> {
        let name = &subject.file.name;
        let Subject {
            file,
            grant,
            config,
            ..
        } = subject;
        let driver = self
            .host
            .load(file.clone(), grant.clone(), config.clone())
            .await;
        let driver = driver.with_context(|| format!("{name} cannot be loaded"))?;
        let missing = driver.missing_grants();
        anyhow::ensure!(
            missing.is_empty(),
            "{name} is not granted: {}",
            missing.join("; ")
        );
        driver
            .validate_config(&driver.look_call())
            .await
            .with_context(|| format!("config of {name}"))?;
        Ok(driver)
    }

    /// A claim for one device, which is known from before its first call on.
    pub(super) fn claim(
        &self,
        driver: &WasmDriver,
        pool: &PoolName,
        device: &DeviceName,
    ) -> TestClaim<'_> {
        let name = driver.info().name.clone();
        let mut record = ClaimRecord::new(id(device), ClaimState::Preparing, BOOT);
        record.allocation.devices = vec![AllocatedDevice {
            request: REQUEST.to_owned(),
            driver: name.clone(),
            pool: pool.clone(),
            device: device.clone(),
            share_id: None,
            consumed: BTreeMap::new(),
            admin_access: false,
            binding: Default::default(),
        }];
        let by = PreparedBy {
            kind: DriverKind::Wasm,
            version: driver.info().version.clone(),
            digest: driver.digest().to_owned(),
            lists: false,
        };
        record.drivers.insert(
            name.clone(),
            Box::new(DriverPart {
                by: Some(by),
                ..DriverPart::default()
            }),
        );
        let claim = TestClaim {
            bench: self,
            driver: name,
            record,
        };
        claim.put();
        claim
    }

    /// Returns what drivers wrote below `/sys` since the last call of this function.
    pub(super) fn take_writes(&self) -> Vec<Written> {
        self.values
            .as_ref()
            .map(|values| std::mem::take(&mut values.0.lock().writes))
            .unwrap_or_default()
    }
}

/// The node in a boot.
pub(super) fn facts(boot_id: &str) -> NodeFacts {
    NodeFacts {
        name: NODE.to_owned(),
        boot_id: boot_id.to_owned(),
    }
}

/// The claim of a device has the same name at each run.
fn id(device: &DeviceName) -> ObjectRef {
    let name = format!("claim-{device}");
    ObjectRef::new(NAMESPACE, &name, &name).expect("the name of a device is a DNS label")
}

/// A call of a prepare or an unprepare.
fn call() -> Call {
    Call {
        request_id: nodedock_base::request::new_id(),
        deadline: limit::CLAIM_CALL_DEADLINE,
    }
}

/// A claim in the memory of a workbench, until it is dropped.
pub(super) struct TestClaim<'a> {
    bench: &'a Workbench,
    driver: DriverName,
    record: ClaimRecord,
}

impl TestClaim<'_> {
    /// Prepares the claim; it may be repeated.
    pub(super) async fn prepare(&mut self, driver: &WasmDriver) -> Result<PreparedClaim, Problem> {
        let mut asked = self.record.driver_claim(&self.driver);
        if let Some(values) = &self.bench.values {
            asked.progress = values
                .progress(&self.driver)
                .remove(&self.record.id.uid)
                .unwrap_or_default();
        }
        let prepared = one(driver.prepare(&call(), &[asked]).await)?;
        let part = self.record.drivers.entry(self.driver.clone()).or_default();
        part.prepared = Some(Arc::new(prepared.clone()));
        self.record.state = ClaimState::Prepared;
        if let Some(values) = &self.bench.values {
            values.0.lock().progress.remove(&self.record.id.uid);
        }
        self.put();
        Ok(prepared)
    }

    pub(super) async fn unprepare(&self, driver: &WasmDriver) -> Result<(), Problem> {
        let Some(record) = self.record.driver_record(&self.driver) else {
            return Ok(());
        };
        one(driver.unprepare(&call(), &[record]).await)
    }

    fn put(&self) {
        drop(self.bench.claims.lock().put(Arc::new(self.record.clone())));
    }
}

impl Drop for TestClaim<'_> {
    fn drop(&mut self) {
        self.bench.claims.lock().remove(&self.record.id.uid);
        if let Some(values) = &self.bench.values {
            let mut state = values.0.lock();
            state.progress.remove(&self.record.id.uid);
            state.first.clear();
        }
    }
}

/// The outcome of the one claim of a call.
fn one<T>(outcomes: nodedock_core::driver::Outcomes<T>) -> Result<T, Problem> {
    outcomes.into_values().next().unwrap_or_else(|| {
        Err(Problem::internal(
            ProblemCode::ClaimSkipped,
            "the driver has no outcome for the claim",
        ))
    })
}

/// A value that a driver wrote below `/sys`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Written {
    pub(super) path: String,
    pub(super) before: Option<String>,
    pub(super) after: Option<String>,
}

/// The previous values of one claim at a time, in memory.
#[derive(Default)]
struct Values(Mutex<ValuesState>, Locks<String>);

#[derive(Default)]
struct ValuesState {
    writes: Vec<Written>,
    /// Inode, and value before the claim's first write, by path.
    first: BTreeMap<String, (u64, Option<String>)>,
    progress: BTreeMap<Uid, Vec<u8>>,
}

#[async_trait]
impl Journal for Values {
    async fn lock_path(&self, path: &str) -> Vec<LockGuard<String>> {
        self.1.take([path.to_owned()]).await
    }

    async fn intend(&self, write: &Write<'_>) -> Result<(), Problem> {
        let before = write.before.map(str::to_owned);
        self.0
            .lock()
            .first
            .entry(write.path.to_owned())
            .or_insert((write.inode, before));
        Ok(())
    }

    fn before(
        &self,
        _driver: &DriverName,
        _claims: &[ObjectRef],
        path: &str,
    ) -> Option<(u64, String)> {
        let (inode, before) = self.0.lock().first.get(path).cloned()?;
        Some((inode, before?))
    }

    async fn save_progress(
        &self,
        _: &DriverName,
        claim: &ObjectRef,
        progress: Vec<u8>,
    ) -> Result<(), Problem> {
        self.0.lock().progress.insert(claim.uid.clone(), progress);
        Ok(())
    }

    fn progress(&self, _driver: &DriverName) -> BTreeMap<Uid, Vec<u8>> {
        self.0.lock().progress.clone()
    }

    fn settle(&self, write: &Write<'_>, stands: Option<String>) {
        if let Some(after) = stands {
            let (path, before) = (write.path.to_owned(), write.before.map(str::to_owned));
            self.0.lock().writes.push(Written {
                path,
                before,
                after: Some(after),
            });
        }
    }
}
