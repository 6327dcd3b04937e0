//! The manager of claims, extended resources and pods: its owners, put together.
//!
//! Receives the requests of pods and kubelets. Calls drivers and device plugins through the registry, commits each step to the
//! checkpoint (the intent before the call, the result before the answer), and keeps the CDI files in step with the records. Never reads a
//! driver's socket or file. Decisions are pure and in files of their own: `claims::machine`, and `nodedock_allocator::resource`.
//!
//! Each owner has its own state and locks, and is given the owners that it calls; none calls one that is built after it. `Manager::new` has the order.
//!
//! Locks are taken in this order: a pod, the resource whose devices are chosen for it, then claims in the order of their UIDs. A
//! kubelet's request locks a driver's part of a claim, then the claim, and never a pod. No other lock is held while a driver is called.

mod adapting;
mod answer;
pub mod claims;
pub mod devices;
mod entry;
mod pods;
mod pool_claims;
mod request;
mod view;

#[cfg(test)]
pub(crate) mod tests;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;

use crate::adapters::Adapters;
use crate::cdi::CdiDir;
use crate::cdi_watch::SpecEvent;
use crate::checkpoint::Checkpoint;
use crate::device_metadata::MetadataSettings;
use crate::driver::NodeFacts;
use crate::hardware::Hardware;
use crate::records::values::LeftValues;
use crate::records::{RecordStore, RecordedValues, SharedClaimTable};
use crate::registry::Registry;
use claims::calls::DriverCalls;
use claims::driver_changes::DriverChanges;
use claims::files::FileSettings;
use claims::gone_devices::GoneDevices;
use claims::handles::Handles;
use claims::prepare::Prepares;
use claims::source::ClaimSource;
use claims::unprepare::Unprepares;
use claims::upkeep::Unfinished;
use claims::{ClaimMetrics, Holds, KubeletClaims, Releases, Retries, SpecFiles};
use devices::{ChoiceSettings, DeviceChoices, DeviceSettings, Devices};
use nodedock_base::changes::Changes;
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;

pub use answer::ContainerAnswer;
pub use pods::{PodOutcome, Pods};
pub use request::is_in_use;
pub use view::{PodResource, PodView, ResourceState};

/// Deadlines and facts of the node.
#[derive(Debug, Clone)]
pub struct ManagerSettings {
    pub node: NodeFacts,
    /// Time for which a prepare waits for a device that another claim holds.
    pub exclusive_wait: Duration,
    /// Deadline of one call of a driver; of a device plugin's calls while devices are chosen, and again while they are allocated.
    pub call_deadline: Duration,
    /// Deadline of a device plugin's call before a container starts.
    pub pre_start_deadline: Duration,
    /// Time for which a resource stays after its source is gone.
    pub resource_grace: Duration,
    /// NUMA nodes of this machine, ascending.
    pub numa_nodes: Vec<u32>,
    /// Root of the node's devices, and of the paths that plugins name.
    pub hardware: Hardware,
    pub metadata: MetadataSettings,
    /// A kubelet allocates the devices of native device plugins, and knows alone which are free: requests for them are refused here.
    pub kubelet_allocates: bool,
}

/// Dependencies of a manager.
pub struct ManagerParts {
    pub claims: Arc<SharedClaimTable>,
    pub checkpoint: Checkpoint,
    pub values: Arc<RecordedValues>,
    pub cdi: CdiDir,
    pub registry: Registry,
    /// Device plugins that are drivers.
    pub adapters: Option<Adapters>,
    pub source: Arc<dyn ClaimSource>,
    pub settings: ManagerSettings,
    pub changes: Changes,
    pub conditions: Conditions,
    pub tasks: Tasks,
}

/// The owners of claims, extended resources and pods.
pub struct Manager {
    /// Device plugins that are drivers.
    pub adapters: Option<Adapters>,
    /// The records of claims and pods.
    pub records: Arc<RecordStore>,
    /// CDI files and metadata files.
    pub files: Arc<SpecFiles>,
    /// Holds of devices, which exclude other claims.
    pub holds: Arc<Holds>,
    pub retries: Arc<Retries>,
    pub releases: Arc<Releases>,
    /// Requests of kubelets.
    pub kubelet: Arc<KubeletClaims>,
    /// Extended resources.
    pub devices: Arc<Devices>,
    /// Choice of the devices of extended resources that containers get.
    pub choices: Arc<DeviceChoices>,
    /// Requests of pods.
    pub pods: Arc<Pods>,
    pub claim_metrics: Arc<ClaimMetrics>,
    /// Values below `/sys` that drivers left behind.
    pub left_values: LeftValues,
    /// Devices of prepared claims that their drivers do not have any more.
    pub gone_devices: GoneDevices,
    driver_changes: Arc<DriverChanges>,
    unfinished: Arc<Unfinished>,
    checkpoint: Checkpoint,
    tasks: Tasks,
}

impl Manager {
    /// Puts the owners together: each is given those before it.
    pub fn new(parts: ManagerParts) -> Arc<Self> {
        let ManagerParts {
            claims,
            checkpoint,
            values,
            cdi,
            registry,
            adapters,
            source,
            settings,
            changes,
            conditions,
            tasks,
        } = parts;
        let metrics = Arc::new(ClaimMetrics::default());
        let left_values = values.left.clone();
        let records = Arc::new(RecordStore::new(claims, values.clone(), changes.clone()));
        let files = Arc::new(SpecFiles::new(
            records.clone(),
            cdi,
            FileSettings {
                boot_id: settings.node.boot_id.clone(),
                hardware: settings.hardware.clone(),
                metadata: settings.metadata.clone(),
            },
            conditions.clone(),
            tasks.clone(),
            metrics.clone(),
        ));
        let holds = Arc::new(Holds::new(
            records.clone(),
            files.clone(),
            registry.clone(),
            settings.hardware.clone(),
        ));
        let gone_devices = GoneDevices::default();
        let driver_changes = Arc::new(DriverChanges::new(
            records.clone(),
            registry.clone(),
            gone_devices.clone(),
            conditions.clone(),
            changes.clone(),
            tasks.clone(),
        ));
        let retries = Arc::new(Retries::new(
            records.clone(),
            registry.clone(),
            values.clone(),
        ));
        let calls = Arc::new(DriverCalls::new(
            registry.clone(),
            values.clone(),
            retries.clone(),
            settings.call_deadline,
        ));
        let handles = Handles {
            records: records.clone(),
            files: files.clone(),
            retries: retries.clone(),
            calls,
            values,
            registry: registry.clone(),
            adapters: adapters.clone(),
            tasks: tasks.clone(),
            metrics: metrics.clone(),
        };
        let unprepares = Arc::new(Unprepares::new(&handles));
        let prepares = Arc::new(Prepares::new(
            &handles,
            holds.clone(),
            unprepares.clone(),
            source.clone(),
            settings.node.clone(),
            settings.exclusive_wait,
        ));
        let releases = Arc::new(Releases::new(&handles, unprepares.clone()));
        let unfinished = Arc::new(Unfinished::new(
            &handles,
            unprepares.clone(),
            releases.clone(),
        ));
        let kubelet = Arc::new(KubeletClaims::new(
            &handles,
            prepares.clone(),
            unprepares.clone(),
            source.clone(),
            settings.node.clone(),
        ));
        let devices = Devices::new(
            records.clone(),
            registry,
            adapters.clone(),
            conditions,
            changes,
            tasks.clone(),
            DeviceSettings {
                pre_start_deadline: settings.pre_start_deadline,
                grace: settings.resource_grace,
                kubelet_allocates: settings.kubelet_allocates,
                hardware: settings.hardware,
            },
        );
        let choices = Arc::new(DeviceChoices::new(
            records.clone(),
            holds.clone(),
            unprepares.clone(),
            devices.clone(),
            source,
            tasks.clone(),
            ChoiceSettings {
                call_deadline: settings.call_deadline,
                exclusive_wait: settings.exclusive_wait,
                numa_nodes: settings.numa_nodes,
                kubelet_allocates: settings.kubelet_allocates,
            },
        ));
        let pods = Arc::new(Pods::new(
            &handles,
            prepares,
            unprepares,
            devices.clone(),
            choices.clone(),
            settings.node.boot_id,
        ));
        Arc::new(Self {
            adapters,
            records,
            files,
            holds,
            retries,
            releases,
            kubelet,
            devices,
            choices,
            pods,
            claim_metrics: metrics,
            left_values,
            gone_devices,
            driver_changes,
            unfinished,
            checkpoint,
            tasks,
        })
    }

    /// Starts the tasks that need no request. `files` reports changes in the directory of CDI files.
    pub fn start(&self, files: mpsc::Receiver<SpecEvent>) {
        let (tasks, devices) = (&self.tasks, &self.devices);
        tasks.spawn("cdi-files", self.files.clone().keep_files(files));
        tasks.spawn(
            "resume-unprepare",
            self.unfinished.clone().resume_unprepares(),
        );
        tasks.spawn(
            "driver-changes",
            self.driver_changes.clone().follow_drivers(),
        );
        tasks.spawn("device-pools", devices.clone().follow_pools());
        tasks.spawn("device-grace", devices.clone().end_grace());
        tasks.spawn(
            "device-owners",
            devices.clone().keep_owners(self.checkpoint.clone()),
        );
        tasks.spawn("device-changes", devices.clone().report_changes());
        tasks.spawn("gone-plugins", devices.clone().report_gone_plugins());
    }
}
