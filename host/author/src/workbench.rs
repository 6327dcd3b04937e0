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

use super::compile_cache::CompileCacheArgs;
use super::{beside, grant_beside, read, read_text};
use nodedock_base::locks::{LockGuard, Locks};
use nodedock_command::parameters;
use nodedock_core::driver::values::{Journal, NoJournal, Write};
use nodedock_core::driver::{Call, ClaimDriver, NodeFacts, validate_claims};
use nodedock_core::hardware::Hardware;
use nodedock_core::recording::{Line, RecordedCall, Recordings};
use nodedock_core::records::SharedClaimTable;
use nodedock_core::shares;
use nodedock_core::standard_attributes::NumaNodeForm;
use nodedock_model::grant::Grant;
use nodedock_model::{
    AllocatedDevice, ClaimRecord, ClaimState, ConfigSource, Device, DeviceName, DriverKind,
    DriverName, DriverPart, Inventory, ObjectRef, OpaqueConfig, PoolName, PreparedBy,
    PreparedClaim, Problem, ProblemCode, Uid, limit,
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

/// Use of the devices by claims.
#[derive(Args)]
pub(super) struct UseArgs {
    /// Opaque parameters of the claims for the driver: a JSON object, or a file with JSON or YAML
    #[arg(long, value_name = "FILE|JSON")]
    parameters: Option<String>,
    /// Amount of a capacity that claims request of a device that several claims can share, such as memory=8Gi [default: as the device's policy
    /// has it]; may be given several times
    #[arg(long, value_name = "NAME=QUANTITY")]
    capacity: Vec<String>,
}

/// Parts of a claim beside its device.
#[derive(Default)]
pub(super) struct Use {
    /// JSON text.
    parameters: Option<String>,
    /// Requested amounts of capacities, by name. A device without the capacity, or for one claim alone, has none of them.
    amounts: BTreeMap<String, String>,
}

impl UseArgs {
    pub(super) fn read(&self) -> Result<Use> {
        let parameters = self.parameters.as_deref().map(parameters::read);
        Ok(Use {
            parameters: parameters.transpose()?,
            amounts: parameters::amounts(&self.capacity)?,
        })
    }
}

impl Use {
    /// Fails if an amount is of a capacity that no shared device has: it may be misspelt.
    pub(super) fn check(&self, inventory: &Inventory) -> Result<()> {
        for name in self.amounts.keys() {
            let mut shared = devices(inventory).filter(|(.., it)| it.allow_multiple_allocations);
            anyhow::ensure!(
                shared.any(|(.., device)| device.capacities.contains_key(name.as_str())),
                "no device that several claims can share has the capacity {name}"
            );
        }
        Ok(())
    }
}

/// A device with its pool and its name.
pub(super) type Found<'a> = (&'a PoolName, &'a DeviceName, &'a Device);

/// The devices of an inventory, in the order of their names.
pub(super) fn devices(inventory: &Inventory) -> impl Iterator<Item = Found<'_>> {
    let pools = inventory.pools.iter();
    pools.flat_map(|(name, pool)| {
        pool.devices
            .iter()
            .map(move |(key, device)| (name, key, device))
    })
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
    pub(super) hardware: Hardware,
    /// Recordings of calls that a tool inspects.
    pub(super) recordings: Recordings,
    claims: Arc<SharedClaimTable>,
    /// `None`: on this machine nothing may be written.
    values: Option<Arc<Values>>,
    /// Directory of the recorded machine, and of compiled code if there is no cache.
    _directory: tempfile::TempDir,
}

impl Workbench {
    /// Makes the machine of a snapshot; without one, the driver sees this machine.
    pub(super) fn new(snapshot: Option<&Path>, cache: &CompileCacheArgs) -> Result<Self> {
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
            cache: Some(CachePaths::inside(&cache.directory(directory.path()))),
            compiler: Compiler::this_program(),
            hardware: hardware.clone(),
            node: facts(BOOT),
            numa_node_form: NumaNodeForm::default(),
            recordings: recordings.clone(),
        };
        let host = WasmHost::new(settings, Arc::clone(&claims) as _, journal)
            .context("set up the sandbox")?;
        Ok(Self {
            host,
            hardware,
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

    /// A claim for one device, which is known from before its first call on. Of a device that several claims can share it has a share.
    ///
    /// # Errors
    ///
    /// The device cannot give an amount that is requested.
    pub(super) fn claim(
        &self,
        driver: &WasmDriver,
        (pool, device_name, device): Found<'_>,
        with: &Use,
    ) -> Result<TestClaim<'_>, Problem> {
        let name = driver.info().name.clone();
        let mut record = ClaimRecord::new(id(device_name), ClaimState::Preparing, BOOT);
        let (pool, device_name) = (pool.clone(), device_name.clone());
        let mut allocated = AllocatedDevice::whole(REQUEST, name.clone(), pool, device_name);
        if device.allow_multiple_allocations {
            let amounts = with.amounts.iter();
            let amounts = amounts.filter(|(name, _)| device.capacities.contains_key(name.as_str()));
            allocated.consumed = amounts
                .map(|(capacity, amount)| (capacity.clone(), amount.clone()))
                .collect();
        }
        shares::give(&mut allocated, device, &record.id.uid, 0)?;
        record.allocation.devices = vec![allocated];
        let configs = with.parameters.iter().map(|parameters| OpaqueConfig {
            source: ConfigSource::Claim,
            requests: Vec::new(),
            driver: name.clone(),
            parameters: parameters.clone(),
        });
        record.allocation.configs = configs.collect();
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
            was_called: false,
        };
        claim.put();
        Ok(claim)
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
    /// The driver was called to prepare it.
    was_called: bool,
}

impl TestClaim<'_> {
    /// Has the parameters checked, and prepares the claim; it may be repeated.
    pub(super) async fn prepare(&mut self, driver: &WasmDriver) -> Result<PreparedClaim, Problem> {
        let mut asked = self.record.driver_claim(&self.driver);
        if let Some(values) = &self.bench.values {
            asked.progress = values
                .progress(&self.driver)
                .remove(&self.record.id.uid)
                .unwrap_or_default();
        }
        let asked = std::slice::from_ref(&asked);
        if let Some(verdict) = validate_claims(driver, &call(), asked)
            .await
            .into_values()
            .next()
        {
            verdict?;
        }
        self.was_called = true;
        let prepared = one(driver.prepare(&call(), asked).await)?;
        let part = self.record.drivers.entry(self.driver.clone()).or_default();
        part.prepared = Some(Arc::new(prepared.clone()));
        self.record.state = ClaimState::Prepared;
        if let Some(values) = &self.bench.values {
            values.0.lock().progress.remove(&self.record.id.uid);
        }
        self.put();
        Ok(prepared)
    }

    /// Unprepares the claim, unless its parameters were refused before the driver was called.
    pub(super) async fn unprepare(&self, driver: &WasmDriver) -> Result<(), Problem> {
        let Some(record) = self
            .record
            .driver_record(&self.driver)
            .filter(|_| self.was_called)
        else {
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
