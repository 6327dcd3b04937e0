//! The manager of claims, extended resources and pods.
//!
//! Receives the requests of pods and kubelets. Calls drivers and device plugins through the registry, commits each step to the
//! checkpoint (the intent before the call, the result before the answer), and keeps the CDI files in step with the records. Never reads a
//! driver's socket or file. Decisions are pure and in files of their own: `claims::machine`, and `nodedock_allocator::resource`.
//!
//! Locks are taken in this order: a pod, the resource whose devices are chosen for it, then claims in the order of their UIDs. A
//! kubelet's request locks a driver's part of a claim, then the claim, and never a pod. No other lock is held while a driver is called.

mod answer;
pub mod claims;
pub mod devices;
mod index;
mod pool_claims;
mod view;

#[cfg(test)]
pub(crate) mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, watch};

use crate::adapters::Adapters;
use crate::cdi::CdiDir;
use crate::cdi_watch::SpecEvent;
use crate::checkpoint::Checkpoint;
use crate::device_metadata::{MetadataDir, MetadataSettings};
use crate::driver::{Call, NodeFacts};
use crate::hardware::Hardware;
use crate::manager::claims::hardware::Remembered;
use crate::manager::claims::kubelet::KubeletRequests;
use crate::manager::claims::machine::UnprepareRequest;
use crate::manager::claims::metrics::{ClaimMetrics, UNPREPARE};
use crate::manager::claims::prepare_retry::PrepareRetries;
use crate::manager::claims::source::ClaimSource;
use crate::manager::claims::unprepare_retry::UnprepareRetries;
use crate::manager::claims::values::RecordedValues;
use crate::manager::claims::{ClaimOutcome, PodSelector, SharedClaimTable};
use crate::manager::devices::{Choices, DeviceState, Entry, ResourceOutcome};
use crate::registry::Registry;
use crate::resources::DeviceMetrics;
use nodedock_base::changes::Changes;
use nodedock_base::conditions::Conditions;
use nodedock_base::locks::Locks;
use nodedock_base::tasks::Tasks;
use nodedock_model::{
    Claim, ClaimReference, DriverName, ExtendedResource, ObjectName, ObjectRef, PodRequest,
    Problem, ProblemCode, Uid,
};

pub use answer::ContainerAnswer;
use pool_claims::PoolClaims;
pub use view::{PodResource, PodView, ResourceState};

/// How often devices are chosen for a pod: each repetition means that another claim took one between the choice and the prepare.
const CHOICES_MAX: usize = 4;
/// Others have what a claim wants: another device may be free.
const IN_USE: [ProblemCode; 4] = [
    ProblemCode::DeviceHeld,
    ProblemCode::CounterExceeded,
    ProblemCode::CapacityExceeded,
    ProblemCode::IncompatibleGroups,
];

/// Deadlines and facts of the node.
#[derive(Debug, Clone)]
pub struct ManagerSettings {
    pub node: NodeFacts,
    /// How long a prepare waits for a device that another claim holds.
    pub exclusive_wait: Duration,
    /// Deadline of one call of a driver; of a device plugin's calls while devices are chosen, and again while they are allocated.
    pub call_deadline: Duration,
    /// Deadline of a device plugin's call before a container starts.
    pub pre_start_deadline: Duration,
    /// How long a resource stays after its source has gone.
    pub resource_grace: Duration,
    /// NUMA nodes of this machine, ascending.
    pub numa_nodes: Vec<u32>,
    /// Where the node has its devices, and the paths that plugins name.
    pub hardware: Hardware,
    pub metadata: MetadataSettings,
    /// A kubelet allocates the devices of native device plugins, and knows alone which are free: requests for them are refused here.
    pub kubelet_allocates: bool,
}

/// What a manager is built from.
pub struct ManagerParts {
    pub claims: Arc<SharedClaimTable>,
    pub checkpoint: Checkpoint,
    pub values: Arc<RecordedValues>,
    pub cdi: CdiDir,
    pub registry: Registry,
    /// Device plugins that are drivers; they are given to no other part of the manager.
    pub adapters: Option<Adapters>,
    pub source: Arc<dyn ClaimSource>,
    pub settings: ManagerSettings,
    pub changes: Changes,
    pub conditions: Conditions,
    pub tasks: Tasks,
}

/// The state of claims, extended resources and pods, and everything that changes it.
pub struct Manager {
    /// For the drivers that it makes of device plugins.
    this: Weak<Self>,
    claims: Arc<SharedClaimTable>,
    devices: Mutex<DeviceState>,
    /// One request at a time for a pod.
    pod_locks: Locks<Uid>,
    /// One request at a time of a kubelet for a driver's part of a claim.
    part_locks: Locks<(Uid, DriverName)>,
    /// One operation at a time for a claim.
    claim_locks: Locks<Uid>,
    /// One choice at a time of a resource's devices; no request has two of these locks.
    resource_locks: Locks<ExtendedResource>,
    checkpoint: Checkpoint,
    values: Arc<RecordedValues>,
    cdi: CdiDir,
    metadata: MetadataDir,
    registry: Registry,
    adapters: Option<Adapters>,
    source: Arc<dyn ClaimSource>,
    settings: ManagerSettings,
    changes: Changes,
    conditions: Conditions,
    tasks: Tasks,
    /// Claims with a condition about their CDI files.
    file_conditions: Mutex<BTreeSet<Uid>>,
    /// Wakes the task that repairs files when there is one more.
    file_condition_set: Notify,
    /// What containers got of devices.
    remembered: Remembered,
    prepare_retries: Mutex<PrepareRetries>,
    unprepare_retries: Mutex<UnprepareRetries>,
    kubelet_requests: Mutex<KubeletRequests>,
    /// Changes when a claim may have freed devices: prepares that wait for one decide again.
    claims_freed: watch::Sender<u64>,
    /// Changes when the statuses that drivers report for a kubelet's claims may have changed.
    statuses_changed: watch::Sender<u64>,
    /// Changes when resources, their devices or their allocations did.
    devices_changed: watch::Sender<u64>,
    /// Wakes the task that retries unprepares.
    unprepare_failed: Notify,
    /// Wakes the task that ends the grace period of resources without a source.
    source_gone: Notify,
    /// Wakes the task that reports changes of resources.
    changes_unreported: Notify,
    claim_metrics: ClaimMetrics,
    device_metrics: DeviceMetrics,
    started: tokio::time::Instant,
}

/// The answer to a pod.
#[derive(Debug, Clone, PartialEq)]
pub struct PodOutcome {
    pub pod: ObjectRef,
    /// Of the pod's own claims; pool claims are reported as resources.
    pub claims: Vec<ClaimOutcome>,
    pub resources: Vec<ResourceOutcome>,
    /// Empty unless every claim is prepared and every resource allocated.
    pub containers: Vec<ContainerAnswer>,
}

impl PodOutcome {
    fn interrupted(request: PodRequest) -> Self {
        let resources = devices::interrupted(&request);
        let claim = |reference: ClaimReference| ClaimOutcome {
            namespace: request.pod.namespace.clone(),
            name: reference.claim_name,
            uid: reference.claim_uid,
            end: Err(interrupted()),
        };
        let claims = request.claims.into_iter().map(claim).collect();
        Self {
            pod: request.pod,
            claims,
            resources,
            containers: Vec::new(),
        }
    }
}

impl Manager {
    pub fn new(parts: ManagerParts) -> Arc<Self> {
        let ManagerParts {
            claims,
            checkpoint,
            values,
            cdi,
            registry,
            adapters,
            ..
        } = parts;
        let ManagerParts {
            source,
            settings,
            changes,
            conditions,
            tasks,
            ..
        } = parts;
        let devices = {
            let claims = claims.lock();
            DeviceState::new(pool_claims::resources(claims.pods().map(|pod| &**pod)))
        };
        let manager = Arc::new_cyclic(|this| Self {
            this: this.clone(),
            claims,
            devices: Mutex::new(devices),
            pod_locks: Locks::default(),
            part_locks: Locks::default(),
            claim_locks: Locks::default(),
            resource_locks: Locks::default(),
            checkpoint,
            values,
            cdi,
            metadata: MetadataDir::new(&settings.metadata.directory, settings.metadata.access),
            registry,
            adapters,
            source,
            settings,
            changes,
            conditions,
            tasks,
            file_conditions: Mutex::default(),
            file_condition_set: Notify::new(),
            remembered: Remembered::default(),
            prepare_retries: Mutex::default(),
            unprepare_retries: Mutex::default(),
            kubelet_requests: Mutex::default(),
            claims_freed: watch::Sender::default(),
            statuses_changed: watch::Sender::default(),
            devices_changed: watch::Sender::default(),
            unprepare_failed: Notify::new(),
            source_gone: Notify::new(),
            changes_unreported: Notify::new(),
            claim_metrics: ClaimMetrics::default(),
            device_metrics: DeviceMetrics::default(),
            started: tokio::time::Instant::now(),
        });
        manager.serve_plugins_of_claims();
        manager
    }

    /// Device plugins that are drivers.
    pub fn adapters(&self) -> Option<&Adapters> {
        self.adapters.as_ref()
    }

    /// Starts the tasks that need no request. `files` reports changes in the directory of CDI files.
    pub fn start(self: &Arc<Self>, files: mpsc::Receiver<SpecEvent>) {
        self.spawn("cdi-files", |manager| async move {
            manager.keep_files(files).await
        });
        self.spawn("resume-unprepare", |manager| async move {
            manager.resume_unprepares().await
        });
        self.spawn("driver-changes", |manager| async move {
            manager.follow_drivers().await
        });
        self.spawn("device-pools", |manager| async move {
            manager.follow_pools().await
        });
        self.spawn("device-grace", |manager| async move {
            manager.end_grace().await
        });
        self.spawn("device-owners", |manager| async move {
            manager.keep_owners().await
        });
        self.spawn("device-changes", |manager| async move {
            manager.report_changes().await
        });
    }

    fn spawn<F>(self: &Arc<Self>, name: &'static str, task: impl FnOnce(Arc<Self>) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.tasks.spawn(name, task(self.clone()));
    }

    /// Runs a request to its end: it is not cancelled when the caller drops the returned future.
    async fn complete<T, F>(
        self: &Arc<Self>,
        name: &'static str,
        request: impl FnOnce(Arc<Self>) -> F,
    ) -> Result<T, Problem>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Problem>> + Send + 'static,
    {
        self.tasks
            .complete(name, request(self.clone()))
            .await
            .unwrap_or_else(|| Err(interrupted()))
    }

    /// A driver call of a request, with the usual deadline.
    fn driver_call(&self, request_id: Arc<str>) -> Call {
        Call {
            request_id,
            deadline: self.settings.call_deadline,
        }
    }

    /// Allocates a pod's devices and prepares its claims. Not cancelled when the future is dropped.
    pub async fn prepare_pod(
        self: &Arc<Self>,
        request: PodRequest,
        inline: Vec<Claim>,
        request_id: Arc<str>,
    ) -> PodOutcome {
        let requested = request.clone();
        let work = |manager: Arc<Self>| async move {
            Ok(manager.prepare(request, inline, request_id).await)
        };
        // no error: the outcome says that the work was interrupted
        self.complete("pod", work)
            .await
            .unwrap_or_else(|_| PodOutcome::interrupted(requested))
    }

    /// Unprepares the claims of pods and frees their devices: one outcome for each pod that holds something. Not cancelled when the
    /// future is dropped.
    pub async fn unprepare_pod(
        self: &Arc<Self>,
        selector: PodSelector,
        request_id: Arc<str>,
    ) -> Result<Vec<PodOutcome>, Problem> {
        self.complete("pod", |manager| async move {
            Ok(manager.unprepare(selector, request_id).await)
        })
        .await
    }

    /// Calls the plugins that want to be called before a container starts, and returns what the runtime needs. To be called before each
    /// start. Not cancelled when the future is dropped.
    pub async fn start_container(
        self: &Arc<Self>,
        pod: Uid,
        container: String,
        request_id: Arc<str>,
    ) -> Result<ContainerAnswer, Problem> {
        let work = |manager: Arc<Self>| async move {
            manager.start_one(&pod, &container, request_id).await
        };
        self.complete("pod", work).await
    }

    /// What a pod holds, and what it was answered.
    pub fn pod(&self, uid: &str) -> Option<PodView> {
        PodView::new(&self.table(), uid)
    }

    /// Every pod that holds something, by namespace and name.
    pub fn pods(&self) -> Vec<PodView> {
        let table = self.table();
        let mut pods: Vec<_> = table
            .pods()
            .filter_map(|record| PodView::new(&table, record.pod.uid.as_str()))
            .collect();
        pods.sort_by(|a, b| a.pod.cmp(&b.pod));
        pods
    }

    /// Pods of a name that hold something: several, if one replaced another.
    pub fn pods_named(&self, namespace: ObjectName, name: ObjectName) -> Vec<PodView> {
        let uids = self.select(&PodSelector::Name(namespace, name));
        uids.iter()
            .filter_map(|uid| self.pod(uid.as_str()))
            .collect()
    }

    /// Pods that hold something, those of a kubelet among them: a claim names the pods for which it is reserved.
    pub fn pods_count(&self) -> usize {
        let table = self.table();
        let holds = table.claims().filter_map(|claim| claim.kubelet.as_ref());
        let of_kubelet = holds
            .flat_map(|hold| &hold.consumers)
            .filter(|consumer| consumer.is_pod());
        let uids = table.pods().map(|pod| &pod.pod.uid);
        uids.chain(of_kubelet.map(|pod| &pod.uid))
            .collect::<BTreeSet<_>>()
            .len()
    }

    /// Whether an unprepare of a pod may have something to do.
    pub fn might_need_unprepare(&self, pod: &str) -> bool {
        let table = self.table();
        table.pod(pod).is_some() || !table.claims_of_pod(pod).is_empty()
    }

    async fn prepare(
        &self,
        request: PodRequest,
        inline: Vec<Claim>,
        request_id: Arc<str>,
    ) -> PodOutcome {
        // Also while it waits for a device: an unprepare that comes meanwhile has to find what this request takes.
        let _pod = self.pod_locks.take([request.pod.uid.clone()]).await;
        let _reservations = self.reservations(&request.pod.uid);
        let mut choices = self.choose_devices(&request, &request_id).await;
        let mut tries = 1;
        let claims = loop {
            let pool_claims = PoolClaims::new(&request.pod, &mut choices);
            let (whole, inline) = (pool_claims.request(&request), pool_claims.inline(&inline));
            let mut claims = self
                .prepare_claims(&whole, &inline, request_id.clone())
                .await;
            let refused = claims.split_off(request.claims.len()).into_iter();
            let refused: BTreeMap<_, _> = refused
                .filter_map(|o| Some((o.uid?, o.end.err()?)))
                .collect();
            let mut held = refused.clone();
            held.retain(|_, problem| is_in_use(problem));
            if tries < CHOICES_MAX && !held.is_empty() && !self.tasks.is_stopping() {
                tries += 1;
                for claim in held.keys() {
                    self.choose_again(&request.pod, claim, &request_id, &mut choices)
                        .await;
                }
                continue;
            }
            refused
                .into_iter()
                .for_each(|(claim, p)| pool_claims::set(&claim, &Err(p), &mut choices));
            break claims;
        };
        let resources = Self::outcomes(&request, &choices);
        let containers = self.containers(&request, &claims, &resources);
        PodOutcome {
            pod: request.pod.clone(),
            claims,
            resources,
            containers,
        }
    }

    /// Chooses other devices for a pool claim whose devices another claim took first.
    async fn choose_again(
        &self,
        pod: &ObjectRef,
        claim: &Uid,
        request_id: &Arc<str>,
        choices: &mut Choices,
    ) {
        let chosen = choices
            .values()
            .filter_map(|choice| choice.as_ref().ok()?.as_ref());
        let Some(entry) = chosen
            .into_iter()
            .find(|entry| entry.claim.id.uid == *claim)
            .cloned()
        else {
            return;
        };
        let by = UnprepareRequest::Pod(&pod.uid);
        let others = match self
            .unprepare_one_claim(claim, by, request_id.clone())
            .await
        {
            Ok(()) => self.choose_others(pod, &entry).await,
            Err(problem) => Err(problem),
        };
        let Entry {
            container,
            resource,
            ..
        } = &entry;
        tracing::info!(%pod, container, %resource, request = %request_id, found = others.is_ok(), "another claim took the devices first");
        pool_claims::set(claim, &others, choices);
    }

    /// The answers for a pod's containers, if nothing was refused.
    fn containers(
        &self,
        request: &PodRequest,
        claims: &[ClaimOutcome],
        resources: &[ResourceOutcome],
    ) -> Vec<ContainerAnswer> {
        if claims.iter().any(|claim| claim.end.is_err()) || resources.iter().any(|r| r.end.is_err())
        {
            return Vec::new();
        }
        let (pod, table) = (&request.pod, self.table());
        let containers = match table.pod(pod.uid.as_str()) {
            Some(record) => answer::of_record(record, |uid| table.claim(uid).cloned()),
            // A pod without claims has no record.
            None => request
                .containers
                .iter()
                .map(|container| ContainerAnswer::named(&container.name))
                .collect(),
        };
        for container in containers
            .iter()
            .filter(|container| !container.conflicts.is_empty())
        {
            let (container, conflicts) = (&container.name, &container.conflicts);
            tracing::warn!(%pod, container, ?conflicts, "device plugins contradict each other; the first counts");
        }
        containers
    }

    async fn unprepare(&self, selector: PodSelector, request_id: Arc<str>) -> Vec<PodOutcome> {
        let call = self.driver_call(request_id);
        let mut outcomes = Vec::new();
        for uid in self.select(&selector) {
            let _pod = self.pod_locks.take([uid.clone()]).await;
            // Only now: a prepare of the pod that was under way has ended.
            if let Some(view) = self.view_of_holder(&uid) {
                outcomes.push(self.unprepare_one(view, &call).await);
            }
        }
        // Also the refused claims of pods that hold nothing.
        self.prepare_retries
            .lock()
            .forget(|pod, _| pod.is_some_and(|pod| selector.is(pod)));
        outcomes
    }

    fn select(&self, selector: &PodSelector) -> Vec<Uid> {
        let (namespace, name) = match selector {
            PodSelector::Uid(uid) => return vec![uid.clone()],
            PodSelector::Name(namespace, name) => (namespace, name),
        };
        let pods = self.table().pods_named(namespace, name);
        pods.into_iter()
            .map(|pod| pod.uid)
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect()
    }

    /// What a pod holds; a pod whose own record was lost is known by its claims.
    fn view_of_holder(&self, uid: &Uid) -> Option<PodView> {
        self.pod(uid.as_str())
            .or_else(|| self.table().pod_ref(uid).map(PodView::without_record))
    }

    async fn unprepare_one(&self, view: PodView, call: &Call) -> PodOutcome {
        let started = Instant::now();
        let claims = self.unprepare_claims_of(&view.pod, call).await;
        self.claim_metrics.observe(
            UNPREPARE,
            started,
            claims.iter().any(|claim| claim.end.is_err()),
        );
        self.report_resources(view.resources.iter().map(|of| of.resource.clone()));
        let (claims, resources) = view.unprepared(claims);
        PodOutcome {
            pod: view.pod,
            claims,
            resources,
            containers: Vec::new(),
        }
    }

    async fn start_one(
        &self,
        pod: &Uid,
        container: &str,
        request_id: Arc<str>,
    ) -> Result<ContainerAnswer, Problem> {
        let _pod = self.pod_locks.take([pod.clone()]).await;
        let view = self.pod(pod.as_str()).ok_or_else(|| {
            Problem::not_found(
                ProblemCode::NoSuchPod,
                format!("the pod with UID {pod} holds nothing here"),
            )
        })?;
        let answer = view.startable(container, &self.settings.node.boot_id)?;
        self.check_files_of(pod.as_str()).await?;
        for claim in view.pool_claims_of(container) {
            self.pre_start(claim, &request_id).await?;
        }
        Ok(answer)
    }
}

/// Whether others have what a claim wants.
pub fn is_in_use(problem: &Problem) -> bool {
    IN_USE.iter().any(|code| problem.code == *code)
}

fn interrupted() -> Problem {
    Problem::unavailable(ProblemCode::Interrupted, "the daemon is stopping")
}
