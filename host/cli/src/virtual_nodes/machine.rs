//! A recorded machine and the drivers on it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use nodedock_core::driver::values::NoJournal;
use nodedock_core::driver::{NodeFacts, Published};
use nodedock_core::recording::Recordings;
use nodedock_core::records::SharedClaimTable;
use nodedock_core::standard_attributes::NumaNodeForm;
use nodedock_model::grant::Grant;
use nodedock_model::{DriverName, limit};
use nodedock_wasm::trust::open;
use parking_lot::Mutex;

use nodedock_wasm::{
    CachePaths, Compiler, DriverFile, WasmDriver, WasmHost, WasmSettings, driver_config,
};

use nodedockd::app::hardware;

/// A driver's file with its grant and its config.
pub(super) struct DriverFiles {
    path: PathBuf,
    file: DriverFile,
    grant: Grant,
    config: Option<String>,
}

impl DriverFiles {
    /// Reads every `NAME.wasm` of a directory, each with `NAME.grant.yaml` and `NAME.config.yaml` where these exist.
    pub(super) fn all(directory: &Path) -> Result<Vec<Self>> {
        let entries = std::fs::read_dir(directory)
            .with_context(|| format!("read {}", directory.display()))?;
        let mut paths = Vec::new();
        for entry in entries {
            let path = entry
                .with_context(|| format!("read {}", directory.display()))?
                .path();
            if path
                .extension()
                .is_some_and(|extension| extension == "wasm")
            {
                paths.push(path);
            }
        }
        ensure!(
            !paths.is_empty(),
            "{} has no driver (NAME.wasm)",
            directory.display()
        );
        paths.sort();
        paths.into_iter().map(Self::read).collect()
    }

    fn read(path: PathBuf) -> Result<Self> {
        let bytes = read(&path, limit::DRIVER_FILE_BYTES_MAX)?;
        let name = path
            .file_name()
            .unwrap_or(path.as_os_str())
            .to_string_lossy()
            .into_owned();
        let grant = match beside(&path, "grant.yaml")? {
            Some((path, text)) => {
                Grant::parse(&text).with_context(|| format!("grant {}", path.display()))?
            }
            None => Grant::empty(),
        };
        let config = match beside(&path, "config.yaml")? {
            Some((path, text)) => {
                Some(driver_config(&text).with_context(|| format!("config {}", path.display()))?)
            }
            None => None,
        };
        Ok(Self {
            path,
            file: DriverFile {
                name,
                bytes: bytes.into(),
            },
            grant,
            config,
        })
    }
}

/// Reads the file beside a driver's, if there is one.
fn beside(driver: &Path, extension: &str) -> Result<Option<(PathBuf, String)>> {
    let path = driver.with_extension(extension);
    if !path
        .try_exists()
        .with_context(|| format!("look at {}", path.display()))?
    {
        return Ok(None);
    }
    let text = String::from_utf8(read(&path, limit::SIDE_FILE_BYTES_MAX)?)
        .with_context(|| format!("{} is not UTF-8 text", path.display()))?;
    Ok(Some((path, text)))
}

fn read(path: &Path, max: u64) -> Result<Vec<u8>> {
    let opened = open::open(path, max).with_context(|| format!("read {}", path.display()))?;
    Ok(opened.bytes)
}

/// Nodes of one snapshot share it. Nothing changes its files: a driver that writes values below `/sys` or binds functions is refused.
pub(super) struct Machine {
    pub(super) drivers: Vec<Arc<WasmDriver>>,
    pub(super) boot_id: String,
    /// Inventory that each driver found on the last node.
    found: Mutex<BTreeMap<DriverName, Arc<Published>>>,
}

impl Machine {
    /// Makes the machine of a snapshot in a directory, and loads the drivers. `cache` has the compiled code of all machines.
    pub(super) async fn load(
        snapshot: &Path,
        directory: &Path,
        cache: &Path,
        files: &[DriverFiles],
    ) -> Result<Self> {
        let boot_id = uuid::Uuid::new_v4().to_string();
        std::fs::create_dir_all(directory)
            .with_context(|| format!("make {}", directory.display()))?;
        let settings = WasmSettings {
            cache: Some(CachePaths::inside(cache)),
            compiler: Compiler::this_program(),
            hardware: hardware::simulated(snapshot, &directory.join("hardware"), &boot_id)?,
            node: NodeFacts {
                name: String::new(),
                boot_id: boot_id.clone(),
            },
            numa_node_form: NumaNodeForm::default(),
            recordings: Recordings::default(),
        };
        let host = WasmHost::new(
            settings,
            Arc::new(SharedClaimTable::default()),
            Arc::new(NoJournal),
        )
        .context("set up the sandbox for drivers")?;
        let mut drivers: Vec<Arc<WasmDriver>> = Vec::with_capacity(files.len());
        for DriverFiles {
            path,
            file,
            grant,
            config,
        } in files
        {
            let driver = host.load(file.clone(), grant.clone(), config.clone()).await;
            let driver = driver.with_context(|| format!("load {}", path.display()))?;
            let missing = driver.missing_grants();
            ensure!(
                missing.is_empty(),
                "{} is not granted: {}",
                path.display(),
                missing.join(", ")
            );
            let checked = driver.validate_config(&driver.look_call()).await;
            checked.with_context(|| format!("config of {}", path.display()))?;
            let name = &driver.info().name;
            if let Some(other) = drivers.iter().position(|other| other.info().name == *name) {
                bail!(
                    "{} and {} are both driver {name}",
                    files[other].path.display(),
                    path.display()
                );
            }
            drivers.push(Arc::new(driver));
        }
        Ok(Self {
            drivers,
            boot_id,
            found: Mutex::default(),
        })
    }

    pub(super) fn driver(&self, name: &DriverName) -> Option<&Arc<WasmDriver>> {
        self.drivers
            .iter()
            .find(|driver| driver.info().name == *name)
    }

    /// Returns what a driver found, in the memory of an equal answer on another node.
    pub(super) fn share(&self, driver: &DriverName, found: Published) -> Arc<Published> {
        let mut known = self.found.lock();
        if let Some(known) = known.get(driver).filter(|known| ***known == found) {
            return Arc::clone(known);
        }
        let found = Arc::new(found);
        known.insert(driver.clone(), Arc::clone(&found));
        found
    }
}
