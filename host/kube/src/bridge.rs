//! Kubelet bridge: every driver that serves claims is offered to the kubelet as a DRA driver, and every pool with a resource name that
//! slices do not offer (`crate::extended_resources`) as a device plugin.
//!
//! Receives the manager and the registry. Owns the sockets in the kubelet's directories, their registrations, and the claims for devices
//! that the kubelet's device manager allocated. `dra` serves drivers and `device_plugins` serves extended resources; both prepare through
//! `claims`. Offers are stored in the checkpoint, so that after a restart the kubelet finds them before drivers are loaded. Never calls a
//! driver. A socket is created under a hidden name and renamed into place, because a kubelet dials every socket that it sees. It may
//! outlive this process and pass from instance to instance (`sockets`).

mod claims;
mod convert;
mod device_plugins;
mod dra;
mod metrics;
mod paths;
mod plugin_claim;
mod pool_use;
mod sockets;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::events::OnRefused;
use crate::extended_resources::ExtendedResources;
use crate::pools::NodePools;
use nodedock_base::changes::Changes;
use nodedock_base::conditions::Conditions;
use nodedock_base::listeners::Listeners;
use nodedock_base::signal::{Listener, Signal};
use nodedock_base::tasks::Tasks;
use nodedock_core::checkpoint::Checkpoint;
use nodedock_core::manager::Manager;
use nodedock_core::manager::claims::KubeletClaims;
use nodedock_core::manager::claims::source::ClaimSource;
use nodedock_core::registry::Registry;
use nodedock_model::{
    DriverName, DriverOffer, ExtendedResource, ObjectName, Problem, ResourceOffer, limit,
};

pub use device_plugins::{PluginRegistration, PluginStatus};
pub use dra::{DriverBridgeStatus, Registration};
pub use metrics::Metrics;
pub use paths::{PathError, SocketPaths};

use device_plugins::{Allocations, OfferedResource};
use dra::OfferedDriver;
use paths::KubeletDirectories;
use pool_use::PoolUse;
use sockets::Handover;

/// Interval of checking the sockets in the kubelet's directories, which costs two `stat` each; failures back off from it, doubled up to
/// the second.
const BRIDGE_LOOK_PERIOD: Duration = Duration::from_secs(1);
const BRIDGE_RETRY_MAX: Duration = Duration::from_secs(30);

/// Stored names of drivers that are offered to a kubelet: the maximum of drivers.
const BRIDGE_DRIVERS_MAX: usize =
    nodedock_model::limit::DRIVER_FILES_MAX + nodedock_model::limit::PLUGIN_SOCKETS_MAX;

/// Periods and waits of the bridge.
#[derive(Debug, Clone, Copy)]
pub struct BridgeTimes {
    /// Interval between two checks that all sockets exist.
    pub look_period: Duration,
    /// Time after the start during which an unknown driver counts as loading.
    pub settle: Duration,
    /// A removed driver is offered for so long: calls wait for one that is being replaced.
    pub gone: Duration,
    /// The same after the kubelet unprepared its last claim: twice a kubelet's retry interval, so that the kubelet notices.
    pub prepared: Duration,
    /// The same for a driver that was offered before the start: compiling a driver may take three minutes.
    pub remembered: Duration,
    /// Time after an Allocate during which later containers of the same pod may reuse its devices; a kubelet admits a pod as a whole.
    pub admission: Duration,
    /// Interval between two lists of the devices that pods use, with a jitter of a quarter.
    pub in_use_period: Duration,
    /// The same while a claim begins or ends.
    pub in_use_pace: Duration,
    /// Devices that a list had and later ones have not are released after this time, in which at least two lists had none of them.
    pub unused: Duration,
    /// Devices that no list had yet are released after this time: a kubelet does not list those of init containers.
    pub unseen: Duration,
}

impl Default for BridgeTimes {
    fn default() -> Self {
        Self {
            look_period: BRIDGE_LOOK_PERIOD,
            settle: Duration::from_secs(10),
            gone: limit::DRIVER_RETURN,
            prepared: Duration::from_secs(180),
            remembered: Duration::from_secs(300),
            admission: Duration::from_secs(60),
            in_use_period: Duration::from_secs(5),
            in_use_pace: Duration::from_secs(1),
            unused: Duration::from_secs(1),
            unseen: Duration::from_secs(300),
        }
    }
}

/// Time for which a call waits for a driver that does not serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Patience {
    /// The driver is being loaded.
    loading: Duration,
    /// The driver served a moment ago, and its source is gone.
    returning: Duration,
}

impl Patience {
    /// Of a call without a deadline.
    const MAX: Self = Self {
        loading: limit::DRIVER_WAIT,
        returning: limit::DRIVER_RETURN,
    };
}

/// Dependencies of the bridge.
pub struct BridgeParts {
    /// The kubelet's root directory, by the path that the kubelet itself has: sockets are reported to it below this path.
    pub root: PathBuf,
    /// Makes the sockets, which may outlive this process.
    pub listeners: Listeners,
    /// No instance before this one is still there; otherwise `set_alone` says when it is not any more.
    pub is_alone: bool,
    /// Namespace and name of the pod in which this daemon runs, if it does: a kubelet's list of pods without it is not complete yet.
    pub own_pod: Option<(ObjectName, ObjectName)>,
    /// The directory in which native plugins register with this daemon.
    pub own_registry: PathBuf,
    /// Stores what is offered, for a restart.
    pub checkpoint: Checkpoint,
    pub offered_before: OfferedBefore,
    pub manager: Arc<Manager>,
    pub registry: Registry,
    pub pools: NodePools,
    /// The mechanism of each pool with an extended-resource name.
    pub extended_resources: ExtendedResources,
    /// Has the consumers for which a refused claim is reserved.
    pub source: Arc<dyn ClaimSource>,
    pub on_refused: OnRefused,
    pub changes: Changes,
    pub conditions: Conditions,
    pub times: BridgeTimes,
    pub tasks: Tasks,
}

/// Offers to the kubelet from before the start, as stored in the checkpoint.
#[derive(Debug, Default)]
pub struct OfferedBefore {
    pub drivers: Vec<DriverOffer>,
    pub resources: Vec<ResourceOffer>,
}

/// Handle to the bridge.
#[derive(Clone)]
pub struct Bridge(Arc<Context>);

/// Shared state of the services of all drivers and resources.
struct Context {
    parts: BridgeParts,
    directories: KubeletDirectories,
    metrics: Metrics,
    handover: Handover,
    started: Instant,
    drivers: Mutex<Vec<Arc<OfferedDriver>>>,
    resources: Mutex<BTreeMap<ExtendedResource, Arc<OfferedResource>>>,
    /// Resources that were offered by the own IDs of device plugins, while calls for them may be under way.
    withdrawn: Mutex<Vec<(ExtendedResource, Weak<OfferedResource>)>>,
    allocations: Allocations,
    pool_use: Mutex<PoolUse>,
    /// Resources for which no kubelet is there; while there are any it is a condition.
    waiting: Mutex<BTreeSet<ExtendedResource>>,
    /// No other instance has lists of the kubelet.
    alone: watch::Sender<bool>,
    /// Counts the checks of the drivers' sockets.
    looks: Signal,
}

impl Bridge {
    /// Refuses what can never work. Nothing is offered before `start`.
    pub fn new(parts: BridgeParts) -> Result<Self, PathError> {
        let directories = KubeletDirectories::new(parts.root.clone(), parts.listeners.start())?;
        if overlaps(&directories.registry, &parts.own_registry) {
            return Err(PathError::OwnDirectory(parts.own_registry));
        }
        let bridge = Self(Arc::new(Context {
            handover: Handover::new(parts.tasks.clone()),
            alone: watch::Sender::new(parts.is_alone),
            parts,
            directories,
            metrics: Metrics::default(),
            started: Instant::now(),
            drivers: Mutex::default(),
            resources: Mutex::default(),
            withdrawn: Mutex::default(),
            allocations: Allocations::default(),
            pool_use: Mutex::default(),
            waiting: Mutex::default(),
            looks: Signal::new(),
        }));
        // What is in use is known before the mechanisms are decided.
        let extended_resources = &bridge.0.parts.extended_resources;
        extended_resources.report(|reported| reported.in_use = bridge.0.pools_in_use());
        Ok(bridge)
    }

    /// Offers drivers and resources until the tasks stop. What was offered before a restart is offered at once.
    pub fn start(&self) {
        self.0
            .parts
            .tasks
            .spawn("bridge", dra::offer(self.0.clone()));
        device_plugins::start(&self.0);
    }

    /// Hands over to another instance: calls are forwarded to it, and all sockets stay as they are until the tasks stop, regardless of the
    /// state of their drivers here.
    pub fn hold(&self) {
        self.0.handover.begin();
    }

    /// The instance before has ended its lists: those of the kubelet are this one's from now on.
    pub fn set_alone(&self) {
        self.0.alone.send_replace(true);
    }

    /// Drivers that are offered, by name.
    pub fn drivers(&self) -> Vec<DriverBridgeStatus> {
        self.0
            .drivers
            .lock()
            .iter()
            .map(|driver| driver.status())
            .collect()
    }

    /// Extended resources that are offered, by name.
    pub fn resources(&self) -> Vec<PluginStatus> {
        self.0
            .resources
            .lock()
            .values()
            .map(|resource| resource.status())
            .collect()
    }

    /// Returns whether a kubelet is connected that registered a driver. A connection alone may be that of a probe.
    pub fn has_kubelet(&self) -> bool {
        self.drivers()
            .iter()
            .any(|driver| driver.connections > 0 && driver.registration == Registration::Registered)
    }

    /// Changes whenever the drivers' sockets were checked, and missing ones created again.
    pub fn looks(&self) -> Listener {
        self.0.looks.subscribe()
    }

    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// The owner of a kubelet's requests. Fails while the daemon hands over to another instance.
    pub fn claims(&self) -> Result<&Arc<KubeletClaims>, Problem> {
        self.0.kubelet_claims()
    }
}

impl Context {
    /// Returns the parameters with which each socket is opened.
    fn sockets(&self) -> (&Listeners, &Handover) {
        (&self.parts.listeners, &self.handover)
    }

    fn serves(&self, driver: &DriverName) -> bool {
        self.parts.registry.serving(driver).is_ok()
    }

    /// Returns whether a driver does not serve yet but may do so soon. Shortly after the start it is not known which drivers exist.
    fn may_come(&self, driver: &DriverName) -> bool {
        let settled = Instant::now() >= self.started + self.parts.times.settle;
        !self.serves(driver) && (self.parts.registry.is_under_way(driver) || !settled)
    }

    /// Waits until a driver serves. False: it does not come in time.
    async fn serves_within(&self, driver: &DriverName, patience: Patience) -> bool {
        let registry = &self.parts.registry;
        let loading = if self.may_come(driver) {
            patience.loading
        } else {
            Duration::ZERO
        };
        let wait = if registry.may_return(driver) {
            loading.max(patience.returning)
        } else {
            loading
        };
        let may_come = || self.may_come(driver) || registry.may_return(driver);
        tokio::select! {
            () = self.parts.tasks.stopped() => false,
            serves = registry.serves_by(driver, Instant::now() + wait, may_come) => serves,
        }
    }
}

/// Returns whether one directory is the other, or is inside it: both are watched recursively. Links are resolved as far as possible.
fn overlaps(one: &Path, other: &Path) -> bool {
    let (one, other) = (resolved(one), resolved(other));
    one.starts_with(&other) || other.starts_with(&one)
}

fn resolved(path: &Path) -> PathBuf {
    std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}
