//! A kubelet: what it does with the sockets of plugins.
//!
//! It registers what appears in `plugins_registry`, prepares and unprepares the claims of pods through DRA, follows the health of
//! devices, takes device plugins and allocates from them, and answers on the pod-resources socket. Orders, deadlines and refusals
//! are those of Kubernetes 1.36, or of 1.37 where a test asks for it. Pods are run only as far as their devices go.
//!
//! Other than a real one it looks at a change of a directory at once, not within a second, it keeps no checkpoint on disk but what is
//! prepared over [`Kubelet::restart`], and its device plugins' directory is below the root like every other.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

mod authority;
mod devices;
mod dra;
mod health;
mod plugins;
mod pod_resources;
mod pods;
mod state;
#[cfg(test)]
mod tests;

pub use devices::{Allocation, Resource};
pub use dra::{ClaimRef, PreparedDevice};
pub use health::DeviceHealth;
pub use state::{Call, View};

use crate::api_server::ApiServer;
use crate::deadline::{DEADLINE, within};
use state::Inner;

/// Which release it is, where they differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// Health is `v1alpha1`, and asked of every driver.
    V1_36,
    /// Health is `v1`, or else `v1alpha1`, and asked of drivers that offer it; endpoints must be below the root and short.
    V1_37,
}

/// Called with slices to delete: of one driver, or of all when the kubelet starts.
pub type Wipes = Arc<dyn Fn(Option<&str>) + Send + Sync>;
/// Reads a ResourceClaim by namespace and name.
pub type Claims = Arc<dyn Fn(&str, &str) -> Option<Value> + Send + Sync>;

/// What a kubelet is started with. The figures are those of a real one.
#[derive(Clone)]
pub struct KubeletOptions {
    pub release: Release,
    /// DRA services it knows, as plugins advertise them.
    pub services: Vec<String>,
    pub dial_timeout: Duration,
    pub get_info_timeout: Duration,
    pub notify_timeout: Duration,
    pub call_timeout: Duration,
    /// The first pause after a registration that failed; it doubles.
    pub register_again: Duration,
    pub register_again_most: Duration,
    /// Without a connection to a driver.
    pub wipe_after: Duration,
    pub health_again: Duration,
    pub wipes: Option<Wipes>,
    pub claims: Option<Claims>,
}

impl Default for KubeletOptions {
    fn default() -> Self {
        Self {
            release: Release::V1_36,
            services: vec!["v1.DRAPlugin".to_owned(), "v1beta1.DRAPlugin".to_owned()],
            dial_timeout: Duration::from_secs(10),
            get_info_timeout: Duration::from_secs(1),
            notify_timeout: Duration::from_secs(5),
            call_timeout: Duration::from_secs(45),
            register_again: Duration::from_millis(500),
            register_again_most: Duration::from_secs(122),
            wipe_after: Duration::from_secs(30),
            health_again: Duration::from_secs(5),
            wipes: None,
            claims: None,
        }
    }
}

impl KubeletOptions {
    /// Of a node of a cluster: it reads claims from the server and wipes slices there.
    pub fn of_node(server: &Arc<ApiServer>, node: &str) -> Self {
        let (reads, writes, node) = (Arc::clone(server), Arc::clone(server), node.to_owned());
        let claims = move |namespace: &str, name: &str| reads.get("resourceclaims", namespace, name);
        let wipes = move |driver: Option<&str>| {
            writes.wipe_slices(&node, driver);
        };
        Self { claims: Some(Arc::new(claims)), wipes: Some(Arc::new(wipes)), ..Self::default() }
    }
}

impl std::fmt::Debug for KubeletOptions {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.debug_struct("KubeletOptions").field("release", &self.release).finish_non_exhaustive()
    }
}

/// A kubelet on a directory. It ends when it is dropped; what plugins left in the directory stays.
#[derive(Debug)]
pub struct Kubelet {
    inner: Arc<Inner>,
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    end: CancellationToken,
    tasks: TaskTracker,
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        if let Some(running) = &self.running {
            running.end.cancel();
        }
        // Ends what follows instances and plugins.
        self.inner.change(state::State::process_ended);
    }
}

impl Kubelet {
    /// `root` is what `/var/lib/kubelet` is on a node; its directories are made.
    pub async fn start(root: &Path, options: KubeletOptions) -> Self {
        let inner = Arc::new(Inner::new(root, options));
        let mut kubelet = Self { inner, running: None };
        kubelet.start_again().await;
        kubelet
    }

    /// Ends as a process does: connections are closed, nothing is unprepared, and its socket files stay.
    pub async fn stop(&mut self) {
        if let Some(running) = self.running.take() {
            running.end.cancel();
            running.tasks.close();
            running.tasks.wait().await;
        }
        self.inner.change(state::State::process_ended);
    }

    /// After [`Self::stop`]: slices are wiped, the sockets of device plugins deleted, registration sockets found again.
    pub async fn start_again(&mut self) {
        self.stop().await;
        let (end, tasks) = (CancellationToken::new(), TaskTracker::new());
        for dir in ["plugins_registry", "plugins", "device-plugins", "pod-resources"] {
            std::fs::create_dir_all(self.root().join(dir)).expect("the kubelet's directories can be made");
        }
        if let Some(wipes) = &self.inner.options.wipes {
            wipes(None);
        }
        self.inner.note_quietly("start", "");
        pod_resources::serve(&self.inner, &end, &tasks);
        devices::serve(&self.inner, &end, &tasks);
        plugins::watch(&self.inner, &end, &tasks);
        self.running = Some(Running { end, tasks });
    }

    /// Stops and starts: what is prepared is remembered, but prepared again for each new sandbox.
    pub async fn restart(&mut self) {
        self.start_again().await;
    }

    pub fn root(&self) -> &Path {
        &self.inner.root
    }

    pub fn plugins_registry(&self) -> PathBuf {
        self.root().join("plugins_registry")
    }

    pub fn device_plugins(&self) -> PathBuf {
        self.root().join("device-plugins")
    }

    /// Everything it called and was called for, in order.
    pub fn calls(&self) -> Vec<Call> {
        self.inner.look(|state| state.calls.clone())
    }

    pub fn forget_calls(&self) {
        self.inner.change(|state| state.calls.clear());
    }

    /// Waits until `look` finds what it wants.
    ///
    /// # Panics
    ///
    /// After [`DEADLINE`] on the wall clock, with the calls until then.
    pub async fn wait_for<T>(&self, what: &str, mut look: impl FnMut(&View<'_>) -> Option<T>) -> T {
        let mut ticks = self.inner.ticks();
        let work = async {
            loop {
                ticks.mark_unchanged();
                if let Some(found) = self.inner.look(|state| look(&View::of(state))) {
                    return found;
                }
                let _ = ticks.changed().await;
            }
        };
        match within(DEADLINE, work).await {
            Some(found) => found,
            None => panic!("waited {DEADLINE:?} for {what}; the kubelet saw:\n{}", self.inner.story()),
        }
    }

    /// As [`Self::wait_for`], for what needs no answer.
    pub async fn wait_until(&self, what: &str, mut look: impl FnMut(&View<'_>) -> bool) {
        self.wait_for(what, |view| look(view).then_some(())).await;
    }

    /// Waits until a DRA driver is registered, has been notified, and is connected.
    pub async fn registered(&self, driver: &str) {
        self.wait_until(&format!("driver {driver}"), |view| view.registered(driver)).await;
    }

    /// Waits until this many instances of a DRA driver are registered, notified, and connected.
    pub async fn connected(&self, driver: &str, count: usize) {
        let what = format!("{count} instances of driver {driver}");
        self.wait_until(&what, |view| view.connected(driver) == count).await;
    }

    /// Waits until no instance of a DRA driver is registered.
    pub async fn deregistered(&self, driver: &str) {
        self.wait_until(&format!("the end of driver {driver}"), |view| view.endpoints(driver).is_empty())
            .await;
    }

    /// Waits until a device plugin has sent this many devices.
    pub async fn devices(&self, resource: &str, count: usize) -> Resource {
        let what = format!("{count} devices of {resource}");
        let found = |view: &View<'_>| {
            view.resource(resource).filter(|found| found.devices.len() == count && found.running)
        };
        self.wait_for(&what, found).await
    }

    /// The health of a driver's devices by pool and name.
    pub fn health(&self, driver: &str) -> BTreeMap<(String, String), DeviceHealth> {
        self.inner.look(|state| View::of(state).health(driver))
    }

    /// One call of `NodePrepareResources` to the instance of `driver` that a kubelet would take, and what it checks of the answer.
    pub async fn prepare(
        &self,
        driver: &str,
        claims: &[ClaimRef],
    ) -> Result<BTreeMap<String, Vec<PreparedDevice>>, String> {
        dra::prepare(&self.inner, driver, claims).await
    }

    /// One call of `NodeUnprepareResources`.
    pub async fn unprepare(&self, driver: &str, claims: &[ClaimRef]) -> Result<(), String> {
        dra::unprepare(&self.inner, driver, claims).await
    }

    /// Makes the sandbox of a pod, as JSON from the API server: prepares its claims unless they are, and gives the CDI devices of each
    /// container. Needs [`KubeletOptions::claims`].
    pub async fn run_pod(&self, pod: &Value) -> Result<BTreeMap<String, Vec<String>>, String> {
        pods::run(&self.inner, pod).await
    }

    /// Ends a pod by its UID: claims that no other pod uses are unprepared. Works without the API server.
    pub async fn stop_pod(&self, uid: &str) -> Result<(), String> {
        pods::stop(&self.inner, uid).await
    }

    /// The claims that are remembered as prepared, or as possibly prepared, by UID.
    pub fn cached_claims(&self) -> Vec<String> {
        self.inner.look(|state| state.claims.values().map(|claim| claim.claim.uid.clone()).collect())
    }

    /// Takes `count` devices of a resource for a container, as admission does, and asks their plugin to allocate them.
    pub async fn allocate(&self, resource: &str, count: usize) -> Result<Allocation, String> {
        devices::allocate(&self.inner, resource, count).await
    }

    /// What a container start asks of a plugin that wants to be asked.
    pub async fn pre_start(&self, allocation: &Allocation) -> Result<(), String> {
        devices::pre_start(&self.inner, allocation).await
    }

    /// Gives devices back, as when their pod has ended.
    pub fn free(&self, allocation: &Allocation) {
        self.inner.change(|state| state.allocations.retain(|held| held.number != allocation.number));
    }
}
