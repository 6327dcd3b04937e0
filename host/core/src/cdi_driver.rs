//! The host's own driver of devices in CDI specs: what vendors' tools wrote for container runtimes becomes devices that are claimed.
//!
//! Is given directories of specs. Owns the last valid spec of each file and the inventory made of them: a pool for each kind, a device for each
//! piece of hardware (`merge`), kept from other claims by identity strings (`exclusion`), with attributes and health from the node (`look`).
//! Prepares by naming the vendors' devices, or by copying their edits (`claims`). Emits the driver to the registry, and conditions about specs.
//! Never writes a spec.
//!
//! # Life of a spec
//!
//! read → known → (not valid any more: its devices are unhealthy) → gone. One that cannot be read stays as it was. Directories are watched; the
//! device nodes are looked at periodically. Claims keep what they were given, whatever becomes of a spec.

mod claims;
mod exclusion;
mod look;
mod merge;

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until};

use self::claims::CdiClaims;
use self::look::{CdiDevices, Looked, ReadSpecs, look, read};
use crate::driver::{Driver, DriverIdentity, Published};
use crate::hardware::Hardware;
use crate::registry::Registry;
use crate::registry::names::BindError;
use crate::standard_attributes::NumaNodeForm;
use crate::sysfs::blocking::{SYSFS_THREADS_PER_DRIVER, blocking};
use crate::sysfs::{SysfsRoot, read_stuck};
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_base::watched;
use nodedock_model::grant::pattern::{self, PatternError, PatternSet};
use nodedock_model::{DriverKind, DriverName, NameSource, Problem, ProblemCode, limit};

/// The vendor of kinds that Nodedock itself writes.
const OWN_VENDOR: &str = "nodedock.dev";
/// The class of specs that DRA drivers write for one claim, and the beginning of their vendors.
const CLAIM_CLASS: &str = "claim";
const DRA_VENDOR: &str = "k8s.";
/// Interval between looks at the device nodes, which are in directories that no watch covers. A look takes microseconds for each node.
const NODES_PERIOD: Duration = Duration::from_secs(5);
/// Interval between reads of the specs: the daemon writes to such a directory itself for each claim.
const READ_PERIOD_MIN: Duration = Duration::from_secs(1);
/// Time for a look.
const LOOK_WALL: Duration = Duration::from_secs(10);

/// The answer for a prepared device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CdiAnswer {
    /// The name of the vendor's spec, which the container runtime reads.
    #[default]
    Names,
    /// A copy of the edits at the time of the prepare.
    Edits,
}

/// Globs of kinds of CDI devices, such as `nvidia.com/*`.
#[derive(Debug, Clone, Deserialize)]
#[serde(try_from = "Vec<String>")]
pub struct CdiKinds {
    globs: Vec<String>,
    patterns: PatternSet,
}

/// Settings of the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CdiDriverSettings {
    pub driver: DriverName,
    /// Kinds that are offered. `None`: all but those that DRA drivers write for claims.
    pub kinds: Option<CdiKinds>,
    /// Directories by ascending precedence.
    pub directories: Vec<PathBuf>,
    pub answer: CdiAnswer,
}

/// Dependencies of the driver.
pub struct CdiDriverParts {
    pub registry: Registry,
    pub conditions: Conditions,
    pub sysfs: SysfsRoot,
    pub numa_node_form: NumaNodeForm,
    pub hardware: Hardware,
}

impl TryFrom<Vec<String>> for CdiKinds {
    type Error = CdiKindsError;

    fn try_from(globs: Vec<String>) -> Result<Self, CdiKindsError> {
        if globs.len() > limit::POOLS_MAX {
            return Err(CdiKindsError::TooMany(globs.len()));
        }
        for glob in &globs {
            pattern::compile(glob).map_err(|source| CdiKindsError::Glob {
                glob: glob.clone(),
                source,
            })?;
            if glob.matches('/').count() != 1 {
                return Err(CdiKindsError::Kind(glob.clone()));
            }
        }
        let patterns = PatternSet::new(globs.iter().cloned()).map_err(CdiKindsError::Together)?;
        Ok(Self { globs, patterns })
    }
}

impl PartialEq for CdiKinds {
    fn eq(&self, other: &Self) -> bool {
        self.globs == other.globs
    }
}

impl Eq for CdiKinds {}

/// Why kinds are none.
#[derive(Debug, thiserror::Error)]
pub enum CdiKindsError {
    #[error("{0} kinds, at most {max} are allowed", max = limit::POOLS_MAX)]
    TooMany(usize),
    #[error("the kind {glob:?} is no glob: {source}")]
    Glob { glob: String, source: PatternError },
    #[error("the kind {0:?} is not VENDOR/CLASS, such as nvidia.com/gpu or nvidia.com/*")]
    Kind(String),
    #[error("the kinds are too large together: {0}")]
    Together(PatternError),
}

impl CdiDriverSettings {
    /// Returns whether the driver offers devices of a kind.
    fn has(&self, kind: &str) -> bool {
        let (vendor, class) = kind.split_once('/').unwrap_or((kind, ""));
        let is_wanted = match &self.kinds {
            Some(kinds) => kinds.patterns.matches(kind),
            None => class != CLAIM_CLASS && !vendor.starts_with(DRA_VENDOR),
        };
        is_wanted && vendor != OWN_VENDOR
    }
}

/// The driver, and what it has of the node.
pub struct CdiDriver {
    parts: Arc<CdiDriverParts>,
    settings: Arc<CdiDriverSettings>,
    specs: Arc<ReadSpecs>,
    /// The specs may have changed since they were read.
    is_outdated: bool,
    devices: watch::Sender<Option<Arc<CdiDevices>>>,
    /// The inventory in the registry. `None`: the driver serves without one, or not at all.
    published: Option<watch::Sender<Arc<Published>>>,
    refused: Option<String>,
    /// Threads that read the specs, or hang.
    looks: Arc<Semaphore>,
}

impl CdiDriver {
    /// Registers the driver without an inventory, so that its claims can be unprepared.
    pub fn register(parts: CdiDriverParts, settings: CdiDriverSettings) -> Self {
        let mut driver = Self {
            parts: Arc::new(parts),
            settings: Arc::new(settings),
            specs: Arc::default(),
            is_outdated: true,
            devices: watch::Sender::new(None),
            published: None,
            refused: None,
            looks: Arc::new(Semaphore::new(SYSFS_THREADS_PER_DRIVER)),
        };
        driver.serve(None);
        driver
    }

    /// Starts the task that publishes devices, and the watches of the directories.
    pub fn start(self, tasks: &Tasks) {
        let (sender, reports) = mpsc::channel(1);
        let directories: BTreeSet<_> = self.settings.directories.iter().cloned().collect();
        for directory in directories {
            let watch = watched::changes(directory, tasks.clone(), sender.clone());
            tasks.spawn("cdi-spec-directory", watch);
        }
        drop(sender);
        // What is not published is published after the next start.
        tasks.spawn_until_stopped("cdi-driver", self.run(reports));
    }

    async fn run(mut self, mut reports: mpsc::Receiver<()>) {
        let mut freed = self.parts.registry.names.changes();
        let mut is_watched = !self.settings.directories.is_empty();
        loop {
            freed.mark_unchanged();
            let next = Instant::now() + READ_PERIOD_MIN;
            self.recover_name();
            self.publish().await;
            tokio::select! {
                // Whichever it was, the next round looks at everything.
                report = reports.recv(), if is_watched => {
                    (is_watched, self.is_outdated) = (report.is_some(), true);
                    // Tools write a file in several steps.
                    sleep_until(next.max(Instant::now() + limit::FILE_SETTLE)).await;
                    while reports.try_recv().is_ok() {}
                }
                changed = freed.changed() => if changed.is_err() { return },
                () = sleep(NODES_PERIOD) => {}
            }
        }
    }

    fn source(&self) -> NameSource {
        NameSource::cdi(&self.settings.driver)
    }

    fn key(&self) -> String {
        format!("cdi {}", self.settings.driver)
    }

    /// Registers the driver again if another had its name, or has it now.
    fn recover_name(&mut self) {
        let (registry, name) = (&self.parts.registry, &self.settings.driver);
        let owner = registry.names.owner_of(name);
        let is_of_another = owner.is_some_and(|owner| owner != self.source());
        let is_registered = registry.kind(name) == Some(DriverKind::Cdi);
        if is_of_another || self.refused.is_some() || !is_registered {
            self.published = None;
            self.serve(None);
        }
    }

    /// Makes the driver serve, with its inventory once there is one.
    fn serve(&mut self, inventory: Option<watch::Receiver<Arc<Published>>>) {
        let name = &self.settings.driver;
        let identity = Arc::new(DriverIdentity {
            name: name.clone(),
            kind: DriverKind::Cdi,
            version: String::new(),
            digest: String::new(),
            source: self.key(),
            summary: "devices of CDI specs".to_owned(),
        });
        let claims = CdiClaims {
            driver: name.clone(),
            answer: self.settings.answer,
            hardware: self.parts.hardware.clone(),
            devices: self.devices.subscribe(),
            looks: self.looks.clone(),
        };
        let driver = Driver {
            identity: identity.clone(),
            claims: Some(Arc::new(claims)),
            inventory,
        };
        let refused = self.parts.registry.serve_own(self.source(), driver);
        let refused = refused
            .err()
            .map(|why| format!("the CDI driver does not serve under the name {name}: {why}"));
        let problem = refused
            .clone()
            .map(|why| Problem::conflict(ProblemCode::DriverNameTaken, why));
        let (conditions, sources) = (&self.parts.conditions, &self.parts.registry.sources);
        conditions.update(ProblemCode::DriverNameTaken, &identity.source, problem);
        sources.show_own(&identity, refused.as_deref());
        self.refused = refused;
    }

    /// Reads the specs and publishes their devices. What could not be done is tried in the next round.
    async fn publish(&mut self) {
        if self.refused.is_some() || !self.bind_name().await {
            return;
        }
        let (parts, settings) = (self.parts.clone(), self.settings.clone());
        let (mut specs, is_outdated) = (self.specs.clone(), self.is_outdated);
        let looked = blocking(&self.looks, LOOK_WALL, read_stuck, move || {
            if is_outdated {
                specs = Arc::new(read(&settings.directories, &specs));
            }
            Ok((look(&parts, &settings, &specs)?, specs))
        });
        let subject = self.key();
        let (looked, specs) = match looked.await {
            Ok(looked) => looked,
            Err(problem) => {
                let message = format!("the CDI specs were not read: {problem}");
                let problem = Problem::unavailable(ProblemCode::CdiSpecInvalid, message);
                self.parts.conditions.set(&subject, problem);
                return;
            }
        };
        let Looked {
            devices,
            published,
            problems,
        } = looked;
        for code in [ProblemCode::CdiSpecInvalid, ProblemCode::CdiSpecConflict] {
            self.parts.conditions.replace(code, &problems);
        }
        (self.specs, self.is_outdated) = (specs, false);
        self.devices.send_replace(Some(Arc::new(devices)));
        self.send(Arc::new(published));
    }

    fn send(&mut self, published: Arc<Published>) {
        let (count, key) = (published.inventory.device_count(), self.key());
        let sources = self.parts.registry.sources.clone();
        sources.update(DriverKind::Cdi, &key, |view| view.devices = count);
        let is_changed = match &self.published {
            Some(sender) => sender.send_if_modified(|before| {
                let differs = *before != published;
                *before = published;
                differs
            }),
            None => {
                let (sender, inventory) = watch::channel(published);
                self.published = Some(sender);
                self.serve(Some(inventory));
                true
            }
        };
        if is_changed {
            sources.report_devices(&self.settings.driver);
        }
    }

    /// Makes the name the driver's durably. False: the checkpoint takes no writes now.
    async fn bind_name(&self) -> bool {
        let name = &self.settings.driver;
        match self.parts.registry.names.bind(&self.key(), name).await {
            Err(BindError::NotStored(problem)) => {
                // The checkpoint reports that it takes no writes.
                tracing::debug!(driver = %name, %problem, "the name of the CDI driver is not stored yet");
                false
            }
            // A name that belongs to another source is found by the next look at it.
            Ok(()) | Err(BindError::Refused(_)) => true,
        }
    }
}
