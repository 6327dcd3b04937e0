//! The same small driver in several languages: which files there are, and a sandbox that looks at them without a daemon.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nodedock_core::driver::values::NoJournal;
use nodedock_core::driver::{Call, NodeFacts, PreparedClaims};
use nodedock_core::hardware::Hardware;
use nodedock_core::recording::Recordings;
use nodedock_core::standard_attributes::NumaNodeForm;
use nodedock_model::grant::Grant;
use nodedock_model::{
    AllocatedDevice, ConfigSource, DeviceName, DriverClaim, DriverClaimRecord, DriverName,
    ObjectRef, OpaqueConfig, PoolName, Uid,
};
use nodedock_wasm::{
    CachePaths, CompileBounds, Compiler, DriverFile, LoadError, Profile, WasmDriver, WasmHost,
    WasmSettings,
};
use serde_json::Value;

use crate::machine::sha256;
use crate::places;

pub const GOLDEN: &str = "golden";
pub const GOLDEN_FILE: &str = "golden.wasm";
pub const GOLDEN_NAME: &str = "golden.nodedock.dev";
/// The one file that it reads below `/sys`.
pub const CPUS: &str = "devices/system/cpu/online";

/// A file of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Golden {
    /// Name of the file without `.wasm`.
    pub build: &'static str,
    /// Language that the driver reports.
    pub language: &'static str,
    pub profile: Profile,
    /// True if it is built together with this test.
    always: bool,
}

const fn golden(
    build: &'static str,
    language: &'static str,
    profile: Profile,
    always: bool,
) -> Golden {
    Golden {
        build,
        language,
        profile,
        always,
    }
}

pub const RUST: Golden = golden("rust", "rust", Profile::Pure, true);
pub const RUST_WASIP2: Golden = golden("rust-wasip2", "rust", Profile::Wasi, true);
pub const C: Golden = golden("c", "c", Profile::Pure, false);
pub const PYTHON: Golden = golden("python", "python", Profile::Pure, false);
pub const JAVASCRIPT: Golden = golden("javascript", "javascript", Profile::Wasi, false);
pub const ALL: [Golden; 5] = [RUST, RUST_WASIP2, C, PYTHON, JAVASCRIPT];

impl Golden {
    /// None: the tools for it are not on this machine.
    pub fn bytes(&self) -> Option<Vec<u8>> {
        let path = dir().join(format!("{}.wasm", self.build));
        match std::fs::read(&path) {
            Ok(bytes) => Some(bytes),
            Err(_) if !self.always => None,
            Err(error) => panic!(
                "read {}: {error}; `cargo xtask golden` builds it",
                path.display()
            ),
        }
    }
}

/// Returns the directory to which `cargo xtask golden` writes the files: beside the other drivers.
fn dir() -> PathBuf {
    places::drivers().with_file_name(GOLDEN)
}

/// The compiled drivers that all tests of a build share, and their key: some take tens of seconds to compile.
pub fn cache() -> CachePaths {
    CachePaths::inside(&dir().join("compiled"))
}

/// Resources that the compilation of a file took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spent {
    pub cpu_ms: u64,
    pub memory_peak_mib: u64,
    /// Bytes of what is kept.
    pub kept: usize,
}

impl Spent {
    /// Reads the values that the compiler appends to the code in the shared cache.
    pub fn on(bytes: &[u8]) -> Self {
        let digest = sha256(bytes);
        let entries = std::fs::read_dir(cache().directory)
            .expect("read the cache")
            .map(|entry| entry.expect("read the cache"));
        let of_file = entries.filter(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            name.starts_with(&digest) && name.ends_with(".cwasm")
        });
        // Another build of the compiler may have left its own.
        let newest =
            of_file.max_by_key(|entry| entry.metadata().and_then(|file| file.modified()).ok());
        let compiled =
            std::fs::read(newest.expect("it was compiled").path()).expect("read what is kept");
        Self::said_in(&compiled).expect("the compiler said what it took")
    }

    fn said_in(compiled: &[u8]) -> Option<Self> {
        const NAME: &[u8] = b"\"spent\":";
        let at = compiled
            .windows(NAME.len())
            .rposition(|window| window == NAME)?
            + NAME.len();
        let said = serde_json::Deserializer::from_slice(&compiled[at..])
            .into_iter::<Value>()
            .next()?
            .ok()?;
        let (cpu_ms, memory_peak_mib) =
            (said["cpu_ms"].as_u64()?, said["memory_peak_mib"].as_u64()?);
        Some(Self {
            cpu_ms,
            memory_peak_mib,
            kept: compiled.len(),
        })
    }
}

/// The live claims that a driver is called with.
#[derive(Debug, Default)]
pub struct Claims(Mutex<BTreeMap<Uid, DriverClaimRecord>>);

impl Claims {
    pub fn keep(&self, live: DriverClaimRecord) {
        let mut claims = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        claims.insert(live.claim.id.uid.clone(), live);
    }

    fn all(&self) -> Vec<DriverClaimRecord> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .values()
            .cloned()
            .collect()
    }
}

impl PreparedClaims for Claims {
    fn after(
        &self,
        _: &DriverName,
        device: Option<(&str, &str)>,
        after: Option<&str>,
        limit: usize,
    ) -> Vec<DriverClaimRecord> {
        let is_later =
            |record: &DriverClaimRecord| after.is_none_or(|uid| record.claim.id.uid.as_str() > uid);
        let is_used = |used: &AllocatedDevice| {
            device.is_none_or(|(pool, name)| {
                used.pool.as_str() == pool && used.device.as_str() == name
            })
        };
        let all = self.all().into_iter().filter(is_later);
        all.filter(|record| record.claim.devices.iter().any(is_used))
            .take(limit)
            .collect()
    }

    fn get(&self, _: &DriverName, uid: &str) -> Option<DriverClaimRecord> {
        self.all()
            .into_iter()
            .find(|record| record.claim.id.uid.as_str() == uid)
    }
}

/// A sandbox on this machine that compiles in processes of the built program.
pub fn settings(cache: Option<CachePaths>) -> WasmSettings {
    WasmSettings {
        cache,
        compiler: Compiler::Process {
            program: places::nodedockd(),
            bounds: CompileBounds::default(),
        },
        hardware: Hardware::of_node(),
        node: NodeFacts {
            name: "node-1".to_owned(),
            boot_id: "boot-1".to_owned(),
        },
        numa_node_form: NumaNodeForm::default(),
        recordings: Recordings::default(),
    }
}

/// A node without a daemon: four CPUs below `/sys`, nothing below `/dev`.
pub struct Bench {
    pub claims: Arc<Claims>,
    host: Arc<WasmHost>,
    _dir: tempfile::TempDir,
}

impl Bench {
    /// Compiled drivers are kept in `cache`, if there is one.
    pub fn new(cache: Option<CachePaths>) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (sys, dev) = (dir.path().join("sys"), dir.path().join("dev"));
        let cpus = sys.join(CPUS);
        std::fs::create_dir_all(cpus.parent().expect("it has a directory"))
            .expect("a new directory");
        std::fs::create_dir(&dev).expect("a new directory");
        std::fs::write(cpus, "0-3\n").expect("a new file");
        let settings = WasmSettings {
            hardware: Hardware::in_directory(dir.path()),
            ..settings(cache)
        };
        let claims = Arc::new(Claims::default());
        let host = WasmHost::new(settings, Arc::clone(&claims) as _, Arc::new(NoJournal))
            .expect("set up the sandbox");
        Self {
            claims,
            host,
            _dir: dir,
        }
    }

    /// One at a time: what several tests load is compiled by the first of them.
    pub async fn load(&self, bytes: &[u8], grant: Grant) -> Result<WasmDriver, LoadError> {
        static LOADING: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
        let _loading = LOADING.lock().await;
        let file = DriverFile {
            name: GOLDEN_FILE.to_owned(),
            bytes: bytes.to_vec().into(),
        };
        self.host.load(file, grant, None).await
    }
}

/// The grant that is beside the driver's sources.
pub fn grant() -> Grant {
    Grant::parse(&crate::drivers::side_file(GOLDEN, "grant")).expect("the example's grant")
}

pub fn call() -> Call {
    Call {
        request_id: "golden".into(),
        deadline: Duration::from_secs(40),
    }
}

/// A claim for slots by name, each for a request of its own: `request-0`, `request-1/sub`.
pub fn claim(uid: &str, slots: &[&str]) -> DriverClaim {
    let device = |(i, slot): (usize, &&str)| AllocatedDevice {
        request: if i == 0 {
            "request-0".to_owned()
        } else {
            format!("request-{i}/sub")
        },
        driver: DriverName::new(GOLDEN_NAME).expect("a name"),
        pool: PoolName::new("slots").expect("a name"),
        device: DeviceName::new(slot).expect("a name"),
        share_id: (i > 0).then(|| "5c3f1f1e-share".to_owned()),
        consumed: BTreeMap::new(),
        admin_access: false,
        binding: Default::default(),
    };
    DriverClaim {
        id: ObjectRef::new("default", uid, uid).expect("names"),
        devices: slots.iter().enumerate().map(device).collect(),
        configs: Vec::new(),
        annotations: BTreeMap::new(),
        reserved_for: Vec::new(),
        progress: Vec::new(),
    }
}

/// The claim with parameters of its author more; for all requests, if none is named.
pub fn with_parameters(mut claim: DriverClaim, requests: &[&str], parameters: &str) -> DriverClaim {
    claim.configs.push(OpaqueConfig {
        source: ConfigSource::Claim,
        requests: requests.iter().map(ToString::to_string).collect(),
        driver: DriverName::new(GOLDEN_NAME).expect("a name"),
        parameters: parameters.to_owned(),
    });
    claim
}

/// A claim as the checkpoint keeps it.
pub fn live(claim: DriverClaim, memo: &[u8]) -> DriverClaimRecord {
    DriverClaimRecord {
        claim,
        prepared: true,
        memo: memo.to_vec(),
        driver_version: "0.1.0".to_owned(),
        boot_id: "boot-1".to_owned(),
    }
}
