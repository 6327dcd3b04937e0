//! A pod as a whole: its claims and its extended resources, in one request and one answer.
//!
//! Is given pods' requests; asks the device manager which devices a pod gets, and the claim manager to prepare its claims, with them
//! those that stand for devices of pools. Keeps no state and decides nothing about a device or a claim: what it answers is put
//! together of what the managers hold, so it is the same after a restart.

mod allocator;
mod answer;
mod pooled;
mod view;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::claims::{self, ClaimOutcome, Claims, PodSelector};
use crate::devices::{Devices, ResourceOutcome};
use nodedock_base::locks::Locks;
use nodedock_base::tasks::Tasks;
use nodedock_model::{Claim, ObjectName, ObjectRef, PodRequest, Problem, Uid};

use allocator::Allocator;
pub use answer::ContainerAnswer;
use pooled::Pooled;
pub use pooled::resources;
pub use view::{PodResource, PodView, ResourceState};

/// Times that devices are chosen anew for a pod: each means that somebody took one between the choice and its claim.
const CHOICES_MAX: usize = 4;
/// The claim manager's word for a device that another claim has.
const DEVICE_HELD: &str = "device-held";

/// Handle to what concerns pods as a whole.
#[derive(Clone)]
pub struct Pods(Arc<Inner>);

struct Inner {
    claims: Claims,
    devices: Arc<dyn Allocator>,
    /// One request at a time for a pod. Taken before the locks of the managers.
    pod_locks: Locks<Uid>,
    tasks: Tasks,
}

/// The answer to a pod.
#[derive(Debug, Clone, PartialEq)]
pub struct PodOutcome {
    pub pod: ObjectRef,
    /// Of the pod's own claims; those that stand for devices of pools are told of as resources.
    pub claims: Vec<ClaimOutcome>,
    pub resources: Vec<ResourceOutcome>,
    /// Empty unless every claim is prepared and every resource allocated.
    pub containers: Vec<ContainerAnswer>,
}

impl Pods {
    pub fn new(claims: Claims, devices: Devices, tasks: Tasks) -> Self {
        Self::over(claims, Arc::new(devices), tasks)
    }

    fn over(claims: Claims, devices: Arc<dyn Allocator>, tasks: Tasks) -> Self {
        Self(Arc::new(Inner { claims, devices, pod_locks: Locks::default(), tasks }))
    }

    /// Gives a pod its devices and makes its claims ready. Goes on when the caller goes away.
    pub async fn prepare_pod(
        &self,
        request: PodRequest,
        inline: Vec<Claim>,
        request_id: Arc<str>,
    ) -> PodOutcome {
        let (inner, asked) = (self.0.clone(), request.clone());
        let work = async move { inner.prepare(request, inline, request_id).await };
        self.0.tasks.complete("pod", work).await.unwrap_or_else(|| interrupted_pod(asked))
    }

    /// Gives up what a pod holds: one outcome for each pod that holds something. Goes on when the caller goes away.
    pub async fn unprepare_pod(
        &self,
        selector: PodSelector,
        request_id: Arc<str>,
    ) -> Result<Vec<PodOutcome>, Problem> {
        let inner = self.0.clone();
        let work = async move { inner.unprepare(selector, request_id).await };
        self.0.tasks.complete("pod", work).await.unwrap_or_else(|| Err(interrupted()))
    }

    /// To be called before each start of a container: tells the plugins that want to know of it, and gives what the runtime needs.
    /// Goes on when the caller goes away.
    pub async fn start_container(
        &self,
        pod: Uid,
        container: String,
        request_id: Arc<str>,
    ) -> Result<ContainerAnswer, Problem> {
        let inner = self.0.clone();
        let work = async move { inner.start(&pod, &container, request_id).await };
        self.0.tasks.complete("pod", work).await.unwrap_or_else(|| Err(interrupted()))
    }

    /// What a pod holds, and what it was answered.
    pub fn pod(&self, uid: &str) -> Option<PodView> {
        self.0.view(uid)
    }

    /// Makes the CDI files of a pod's claims right; the problem of the first that cannot be.
    pub async fn check_files_of(&self, pod: &str) -> Result<(), Problem> {
        self.0.claims.check_files_of(pod).await
    }

    /// Every pod that holds something, by namespace and name.
    pub fn pods(&self) -> Vec<PodView> {
        let mut claims: BTreeMap<Uid, claims::PodView> =
            self.0.claims.pods().into_iter().map(|view| (view.pod.pod.uid.clone(), view)).collect();
        let mut pods = Vec::new();
        for allocation in self.0.devices.allocations() {
            let claims = claims.remove(allocation.uid());
            pods.extend(PodView::new(claims, Some(allocation)));
        }
        pods.extend(claims.into_values().filter_map(|claims| PodView::new(Some(claims), None)));
        pods.sort_by(|a, b| a.pod.cmp(&b.pod));
        pods
    }

    /// Pods of a name that hold something: several, where one replaced another.
    pub fn named(&self, namespace: ObjectName, name: ObjectName) -> Vec<PodView> {
        let uids = self.0.select(PodSelector::Name(namespace, name));
        uids.iter().filter_map(|uid| self.0.view(uid.as_str())).collect()
    }

    pub fn pods_count(&self) -> usize {
        let known_by_claims = self.0.claims.pods_count();
        let allocations = self.0.devices.allocations();
        let by_devices_alone = |uid: &Uid| self.0.claims.pod(uid.as_str()).is_none();
        known_by_claims + allocations.iter().filter(|allocation| by_devices_alone(allocation.uid())).count()
    }

    pub fn might_need_unprepare(&self, pod: &str) -> bool {
        self.0.claims.might_need_unprepare(pod) || self.0.devices.allocation(pod).is_some()
    }
}

impl Inner {
    fn view(&self, uid: &str) -> Option<PodView> {
        PodView::new(self.claims.pod(uid), self.devices.allocation(uid))
    }

    async fn prepare(&self, request: PodRequest, inline: Vec<Claim>, request_id: Arc<str>) -> PodOutcome {
        let _pod = self.pod_locks.take([request.pod.uid.clone()]).await;
        let mut resources = self.allocate(&request, &request_id).await;
        let mut choices = 1;
        loop {
            let pooled = self.pooled(&request.pod, &mut resources);
            let (whole, inline) = (pooled.request(&request), pooled.inline(&inline));
            let outcome = self.claims.prepare_pod(whole, inline, request_id.clone()).await;
            let (own, ends) = pooled.split(outcome.claims, request.claims.len());
            let held = ends.iter().filter(|(_, problem)| problem.code == DEVICE_HELD);
            let held: Vec<_> = held.map(|(claim, _)| claim.clone()).collect();
            if choices < CHOICES_MAX && !held.is_empty() && !self.tasks.is_stopping() {
                choices += 1;
                self.choose_anew(&request, &pooled, held, &request_id, &mut resources).await;
                continue;
            }
            pooled.refuse(&ends, &mut resources);
            return self.answer(&request, own, resources, outcome.containers);
        }
    }

    /// One outcome for each resource of each container.
    async fn allocate(&self, request: &PodRequest, request_id: &Arc<str>) -> Vec<ResourceOutcome> {
        let wants_any = request.containers.iter().any(|container| !container.resources.is_empty());
        let outcomes = if wants_any { self.devices.allocate(request, request_id).await } else { Vec::new() };
        answer::complete(request, outcomes)
    }

    /// The claims that stand for what was allocated of pools. What cannot be a claim is refused.
    fn pooled(&self, pod: &ObjectRef, resources: &mut [ResourceOutcome]) -> Pooled {
        let allocation = self.devices.allocation(pod.uid.as_str());
        let Some(allocation) = allocation else { return Pooled::default() };
        Pooled::new(&allocation, resources)
    }

    /// Other devices for claims whose devices somebody else took first.
    async fn choose_anew(
        &self,
        request: &PodRequest,
        pooled: &Pooled,
        held: Vec<Uid>,
        request_id: &Arc<str>,
        resources: &mut [ResourceOutcome],
    ) {
        let pod = &request.pod;
        for claim in held {
            let Some(user) = pooled.user(&claim) else { continue };
            let given_up =
                self.claims.give_up_claims(&pod.uid, vec![claim.clone()], request_id.clone()).await;
            let chosen = match given_up {
                Ok(()) => {
                    self.devices.reallocate(&pod.uid, &user.container, &user.resource, request_id).await
                }
                Err(problem) => Err(problem),
            };
            tracing::info!(%pod, container = user.container, resource = %user.resource, request = %request_id, found = chosen.is_ok(), "devices were taken by somebody else");
            pooled.settle(&claim, &chosen, resources);
        }
    }

    fn answer(
        &self,
        request: &PodRequest,
        claims: Vec<ClaimOutcome>,
        resources: Vec<ResourceOutcome>,
        of_claims: Vec<claims::ContainerAnswer>,
    ) -> PodOutcome {
        let ready = claims.iter().all(|claim| claim.end.is_ok())
            && resources.iter().all(|resource| resource.end.is_ok());
        let allocation = self.devices.allocation(request.pod.uid.as_str());
        let containers =
            if ready { answer::containers(of_claims, allocation.as_deref()) } else { Vec::new() };
        for container in containers.iter().filter(|container| !container.conflicts.is_empty()) {
            let (pod, conflicts) = (&request.pod, &container.conflicts);
            tracing::warn!(%pod, container = container.name, ?conflicts, "device plugins contradict each other; the first is right");
        }
        PodOutcome { pod: request.pod.clone(), claims, resources, containers }
    }

    async fn unprepare(
        &self,
        selector: PodSelector,
        request_id: Arc<str>,
    ) -> Result<Vec<PodOutcome>, Problem> {
        let mut outcomes = Vec::new();
        for uid in self.select(selector) {
            let _held = self.pod_locks.take([uid.clone()]).await;
            // Only now: a prepare that was under way has ended, and what it took is there.
            if let Some(view) = self.view_of_holder(&uid) {
                outcomes.push(self.unprepare_one(view, request_id.clone()).await?);
            }
        }
        Ok(outcomes)
    }

    fn select(&self, selector: PodSelector) -> Vec<Uid> {
        let named = match &selector {
            PodSelector::Uid(uid) => return vec![uid.clone()],
            PodSelector::Name(namespace, name) => (namespace, name),
        };
        let is_named = |pod: &ObjectRef| (&pod.namespace, &pod.name) == named;
        let allocations = self.devices.allocations();
        let of_devices = allocations.iter().map(|allocation| allocation.pod.clone()).filter(is_named);
        let mut uids: Vec<_> =
            self.claims.select(&selector).into_iter().chain(of_devices).map(|p| p.uid).collect();
        uids.sort();
        uids.dedup();
        uids
    }

    /// What a pod holds; a pod whose own record was lost is known by its claims.
    fn view_of_holder(&self, uid: &Uid) -> Option<PodView> {
        let bare = || self.claims.select(&PodSelector::Uid(uid.clone())).pop().map(PodView::bare);
        self.view(uid.as_str()).or_else(bare)
    }

    async fn unprepare_one(&self, view: PodView, request_id: Arc<str>) -> Result<PodOutcome, Problem> {
        let uid = view.pod.uid.clone();
        let outcomes = self.claims.unprepare_pod(PodSelector::Uid(uid.clone()), request_id).await?;
        let claims = outcomes.into_iter().flat_map(|outcome| outcome.claims).collect();
        // Whatever became of the claims: what a device plugin gave needs nobody's consent.
        let freed = match self.devices.allocation(uid.as_str()) {
            Some(_) => self.devices.free(&uid).await,
            None => Ok(()),
        };
        let (claims, resources) = view.given_up(claims, &freed);
        Ok(PodOutcome { pod: view.pod, claims, resources, containers: Vec::new() })
    }

    async fn start(
        &self,
        pod: &Uid,
        container: &str,
        request_id: Arc<str>,
    ) -> Result<ContainerAnswer, Problem> {
        let _pod = self.pod_locks.take([pod.clone()]).await;
        let view = self.view(pod.as_str()).ok_or_else(|| {
            Problem::not_found("no-such-pod", format!("the pod with UID {pod} holds nothing here"))
        })?;
        let answer = view.startable(container, self.claims.boot_id())?;
        self.claims.check_files_of(pod.as_str()).await?;
        if view.has_plugin_devices(container) {
            self.devices.pre_start(pod, container, &request_id).await?;
        }
        Ok(answer)
    }
}

fn interrupted() -> Problem {
    Problem::unavailable("interrupted", "the daemon is stopping")
}

/// The answer to a pod whose request came to no end.
fn interrupted_pod(request: PodRequest) -> PodOutcome {
    let resources = answer::complete(&request, Vec::new());
    let claim = |wanted: nodedock_model::ClaimReference| ClaimOutcome {
        namespace: request.pod.namespace.clone(),
        name: wanted.claim_name,
        uid: wanted.claim_uid,
        end: Err(interrupted()),
    };
    let claims = request.claims.into_iter().map(claim).collect();
    PodOutcome { pod: request.pod, claims, resources, containers: Vec::new() }
}
