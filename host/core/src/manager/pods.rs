//! Pods: their requests as a whole, and what they hold.
//!
//! Is given the owners of claims and of devices. A request locks its pod, chooses devices for its extended resources, and prepares the claims that have
//! them together with the pod's own. Keeps nothing of its own: what a pod holds is in the records.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use super::answer::{self, ContainerAnswer};
use super::claims::files::SpecFiles;
use super::claims::handles::Handles;
use super::claims::machine::UnprepareRequest;
use super::claims::metrics::{ClaimMetrics, PREPARE, UNPREPARE};
use super::claims::prepare::Prepares;
use super::claims::retries::Retries;
use super::claims::unprepare::Unprepares;
use super::claims::{ClaimOutcome, PodSelector};
use super::devices::{self, DeviceChoices, Devices, ResourceOutcome};
use super::entry::{Choices, Entry};
use super::pool_claims::{self, PoolClaims};
use super::request::{complete, interrupted, is_in_use};
use super::view::PodView;
use crate::records::RecordStore;
use nodedock_base::tasks::Tasks;
use nodedock_model::{Claim, ObjectName, ObjectRef, PodRequest, Problem, ProblemCode, Uid};

/// Maximum number of times that devices are chosen for a pod: each repetition means that another claim took one between the choice and the
/// prepare.
pub(super) const CHOICES_MAX: usize = 4;

/// The answer to a pod.
#[derive(Debug, Clone, PartialEq)]
pub struct PodOutcome {
    pub pod: ObjectRef,
    /// Outcomes of the pod's own claims; pool claims are reported as resources.
    pub claims: Vec<ClaimOutcome>,
    pub resources: Vec<ResourceOutcome>,
    /// Empty unless every claim is prepared and every resource allocated.
    pub containers: Vec<ContainerAnswer>,
}

impl PodOutcome {
    /// Refuses every claim and resource of a request.
    fn refused(request: &PodRequest, problem: &Problem) -> Self {
        let resources = devices::refused_outcomes(request, problem);
        let claims = request
            .claims
            .iter()
            .map(|reference| ClaimOutcome {
                namespace: request.pod.namespace.clone(),
                name: reference.claim_name.clone(),
                uid: reference.claim_uid.clone(),
                end: Err(problem.clone()),
            })
            .collect();
        Self {
            pod: request.pod.clone(),
            claims,
            resources,
            containers: Vec::new(),
        }
    }
}

/// The owner of the requests of pods.
pub struct Pods {
    records: Arc<RecordStore>,
    files: Arc<SpecFiles>,
    retries: Arc<Retries>,
    prepares: Arc<Prepares>,
    unprepares: Arc<Unprepares>,
    devices: Arc<Devices>,
    choices: Arc<DeviceChoices>,
    boot_id: String,
    tasks: Tasks,
    metrics: Arc<ClaimMetrics>,
}

impl Pods {
    pub(super) fn new(
        handles: &Handles,
        prepares: Arc<Prepares>,
        unprepares: Arc<Unprepares>,
        devices: Arc<Devices>,
        choices: Arc<DeviceChoices>,
        boot_id: String,
    ) -> Self {
        Self {
            records: handles.records.clone(),
            files: handles.files.clone(),
            retries: handles.retries.clone(),
            prepares,
            unprepares,
            devices,
            choices,
            boot_id,
            tasks: handles.tasks.clone(),
            metrics: handles.metrics.clone(),
        }
    }

    /// Allocates a pod's devices and prepares its claims. Not cancelled when the future is dropped.
    pub async fn prepare(
        self: &Arc<Self>,
        request: PodRequest,
        inline: Vec<Claim>,
        request_id: Arc<str>,
    ) -> PodOutcome {
        let (pods, request) = (self.clone(), Arc::new(request));
        let requested = request.clone();
        let work = async move { Ok(pods.prepare_locked(&request, inline, request_id).await) };
        // no error: the outcome says that the work was interrupted
        complete(&self.tasks, "pod", work)
            .await
            .unwrap_or_else(|_| PodOutcome::refused(&requested, &interrupted()))
    }

    /// Unprepares the claims of pods and frees their devices: one outcome for each pod that holds something. Not cancelled when the
    /// future is dropped.
    pub async fn unprepare(
        self: &Arc<Self>,
        selector: PodSelector,
        request_id: Arc<str>,
    ) -> Result<Vec<PodOutcome>, Problem> {
        let pods = self.clone();
        let work = async move { Ok(pods.unprepare_each(selector, request_id).await) };
        complete(&self.tasks, "pod", work).await
    }

    /// Calls the plugins that want to be called before a container starts, and returns what the runtime needs. To be called before each
    /// start. Not cancelled when the future is dropped.
    pub async fn start_container(
        self: &Arc<Self>,
        pod: Uid,
        container: String,
        request_id: Arc<str>,
    ) -> Result<ContainerAnswer, Problem> {
        let pods = self.clone();
        let work = async move { pods.start_one(&pod, &container, request_id).await };
        complete(&self.tasks, "pod", work).await
    }

    /// Returns the view of a pod: what it holds, and the answers for its containers.
    pub fn get(&self, uid: &str) -> Option<PodView> {
        PodView::new(&self.records.table(), uid)
    }

    /// Every pod that holds something, by namespace and name.
    pub fn list(&self) -> Vec<PodView> {
        let table = self.records.table();
        let mut pods: Vec<_> = table
            .pods()
            .filter_map(|record| PodView::new(&table, record.pod.uid.as_str()))
            .collect();
        pods.sort_by(|a, b| a.pod.cmp(&b.pod));
        pods
    }

    /// Pods of a name that hold something: several, if one replaced another.
    pub fn named(&self, namespace: ObjectName, name: ObjectName) -> Vec<PodView> {
        let uids = self.select(&PodSelector::Name(namespace, name));
        uids.iter()
            .filter_map(|uid| self.get(uid.as_str()))
            .collect()
    }

    /// Pods that hold something, those of a kubelet among them: a claim names the pods for which it is reserved.
    pub fn count(&self) -> usize {
        let table = self.records.table();
        let holds = table.claims().filter_map(|claim| claim.kubelet.as_ref());
        let of_kubelet = holds
            .flat_map(|hold| &hold.consumers)
            .filter(|consumer| consumer.is_pod());
        let uids = table.pods().map(|pod| &pod.pod.uid);
        uids.chain(of_kubelet.map(|pod| &pod.uid))
            .collect::<BTreeSet<_>>()
            .len()
    }

    /// Returns whether an unprepare of a pod may have something to do.
    pub fn might_need_unprepare(&self, pod: &str) -> bool {
        let table = self.records.table();
        table.pod(pod).is_some() || !table.claims_of_pod(pod).is_empty()
    }

    async fn prepare_locked(
        &self,
        request: &PodRequest,
        inline: Vec<Claim>,
        request_id: Arc<str>,
    ) -> PodOutcome {
        // Also while it waits for a device: an unprepare that comes meanwhile has to find what this request takes.
        let _pod = self.records.lock_pods([request.pod.uid.clone()]).await;
        let known = self.view_of_holder(&request.pod.uid);
        if let Some(other) = known.filter(|known| known.pod != request.pod) {
            let message = format!(
                "pod {} has this UID, which {} cannot have too",
                other.pod, request.pod
            );
            let problem = Problem::denied(ProblemCode::PodUidTaken, message);
            return PodOutcome::refused(request, &problem);
        }
        let _reservations = self.choices.reservations(&request.pod.uid);
        let mut choices = self.choices.choose_devices(request, &request_id).await;
        let mut tries = 1;
        let claims = loop {
            let pool_claims = PoolClaims::new(&request.pod, &mut choices);
            let (whole, inline) = (pool_claims.request(request), pool_claims.inline(&inline));
            let started = Instant::now();
            let mut claims = self
                .prepares
                .prepare_claims(&whole, &inline, request_id.clone())
                .await;
            let failed = claims.iter().any(|claim| claim.end.is_err());
            self.metrics.observe(PREPARE, started, failed);
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
        let resources = devices::outcomes(request, &choices);
        let containers = self.containers(request, &claims, &resources);
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
            .unprepares
            .unprepare_one_claim(claim, by, request_id.clone())
            .await
        {
            Ok(()) => self.choices.choose_others(pod, &entry).await,
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
        let (pod, table) = (&request.pod, self.records.table());
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
            let (container, conflicts) = (&container.name, container.conflicts.join("; "));
            tracing::warn!(%pod, container, conflicts, "device plugins contradict each other; the first counts");
        }
        containers
    }

    async fn unprepare_each(&self, selector: PodSelector, request_id: Arc<str>) -> Vec<PodOutcome> {
        let mut outcomes = Vec::new();
        for uid in self.select(&selector) {
            let _pod = self.records.lock_pods([uid.clone()]).await;
            // Only now: a prepare of the pod that was under way has ended.
            let view = self.view_of_holder(&uid);
            if let Some(view) = view.filter(|view| selector.is(&view.pod)) {
                outcomes.push(self.unprepare_one(view, request_id.clone()).await);
            }
        }
        // Also the refused claims of pods that hold nothing.
        self.retries.forget_pods(|pod| selector.is(pod));
        outcomes
    }

    fn select(&self, selector: &PodSelector) -> Vec<Uid> {
        let (namespace, name) = match selector {
            PodSelector::Uid(uid) | PodSelector::UidIn(_, uid) => return vec![uid.clone()],
            PodSelector::Name(namespace, name) => (namespace, name),
        };
        let pods = self.records.table().pods_named(namespace, name);
        pods.into_iter()
            .map(|pod| pod.uid)
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect()
    }

    /// Returns the view of a pod; a pod whose own record was lost is known by its claims.
    fn view_of_holder(&self, uid: &Uid) -> Option<PodView> {
        self.get(uid.as_str()).or_else(|| {
            self.records
                .table()
                .pod_ref(uid)
                .map(PodView::without_record)
        })
    }

    async fn unprepare_one(&self, view: PodView, request_id: Arc<str>) -> PodOutcome {
        let started = Instant::now();
        let claims = self
            .unprepares
            .unprepare_claims_of(&view.pod, request_id)
            .await;
        self.metrics.observe(
            UNPREPARE,
            started,
            claims.iter().any(|claim| claim.end.is_err()),
        );
        self.devices
            .report_resources(view.resources.iter().map(|of| of.resource.clone()));
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
        let _pod = self.records.lock_pods([pod.clone()]).await;
        let view = self.get(pod.as_str()).ok_or_else(|| {
            Problem::not_found(
                ProblemCode::NoSuchPod,
                format!("the pod with UID {pod} holds nothing here"),
            )
        })?;
        let answer = view.startable(container, &self.boot_id)?;
        self.files.check_files_of(pod.as_str()).await?;
        for claim in view.pool_claims_of(container) {
            self.devices.pre_start(claim, &request_id).await?;
        }
        Ok(answer)
    }
}
