//! A kubelet: what it does with the sockets of plugins.
//!
//! It registers the DRA drivers that appear in `plugins_registry` and calls them (`v1`), follows the health of their devices
//! (`v1alpha1`), takes device plugins and allocates from them, and answers on the pod-resources socket. Orders, deadlines and refusals
//! are those of Kubernetes 1.36. It has only what tests of the host use, and no pods: a test calls for them.
//!
//! Other than a real one it looks at a change of a directory at once, not within a second, it keeps no checkpoint, and its device
//! plugins' directory is below the root like every other.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub mod authority;
mod device_plugin;
mod devices;
mod dra;
mod health;
mod instance;
mod plugins;
mod pod_resources;
mod pods;
mod state;
#[cfg(test)]
mod tests;

pub use device_plugin::{Allocation, Resource};
pub use dra::{ClaimRef, Driver};
pub use instance::DeviceHealth;
pub use pods::{PodsAnswer, PodsApi};
pub use state::{Call, View};

use crate::deadline::{DEADLINE, within};
use state::Shared;

/// Called with slices to delete: of one driver, or of all when the kubelet starts.
pub type Wipes = Arc<dyn Fn(Option<&str>) + Send + Sync>;

/// The options of a kubelet. The default values are those of a real one.
#[derive(Clone)]
pub struct KubeletOptions {
    pub dial_timeout: Duration,
    pub call_timeout: Duration,
    /// The first pause after a registration that failed; it doubles.
    pub register_again: Duration,
    /// Time without a connection to a driver until its slices are wiped.
    pub wipe_after: Duration,
    pub health_again: Duration,
    pub wipes: Option<Wipes>,
}

impl Default for KubeletOptions {
    fn default() -> Self {
        Self {
            dial_timeout: Duration::from_secs(10),
            call_timeout: Duration::from_secs(45),
            register_again: Duration::from_millis(500),
            wipe_after: Duration::from_secs(30),
            health_again: Duration::from_secs(5),
            wipes: None,
        }
    }
}

impl std::fmt::Debug for KubeletOptions {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.debug_struct("KubeletOptions").finish_non_exhaustive()
    }
}

/// A kubelet on a directory. It ends when it is dropped; what plugins left in the directory stays.
#[derive(Debug)]
pub struct Kubelet {
    shared: Arc<Shared>,
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
        self.shared.change(state::State::process_ended);
    }
}

impl Kubelet {
    /// `root` is what `/var/lib/kubelet` is on a node; its directories are made.
    pub async fn start(root: &Path, options: KubeletOptions) -> Self {
        let shared = Arc::new(Shared::new(root, options));
        let mut kubelet = Self {
            shared,
            running: None,
        };
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
        self.shared.change(state::State::process_ended);
    }

    /// Starts, and stops before if it runs: slices are wiped, the sockets of device plugins deleted, registration sockets found again.
    pub async fn start_again(&mut self) {
        self.stop().await;
        let (end, tasks) = (CancellationToken::new(), TaskTracker::new());
        for dir in [
            "plugins_registry",
            "plugins",
            "device-plugins",
            "pod-resources",
        ] {
            std::fs::create_dir_all(self.root().join(dir))
                .expect("the kubelet's directories can be made");
        }
        if let Some(wipes) = &self.shared.options.wipes {
            wipes(None);
        }
        self.shared.note_quietly("start", "");
        pod_resources::serve(&self.shared, &end, &tasks);
        devices::serve(&self.shared, &end, &tasks);
        plugins::watch(&self.shared, &end, &tasks);
        self.running = Some(Running { end, tasks });
    }

    pub fn root(&self) -> &Path {
        &self.shared.root
    }

    pub fn device_plugins(&self) -> PathBuf {
        self.root().join("device-plugins")
    }

    /// Everything it called and was called for, in order.
    pub fn calls(&self) -> Vec<Call> {
        self.shared.look(|state| state.calls.clone())
    }

    /// Waits until `look` finds what it wants.
    ///
    /// # Panics
    ///
    /// After [`DEADLINE`] on the wall clock, with the calls until then.
    pub async fn wait_for<T>(&self, what: &str, mut look: impl FnMut(&View<'_>) -> Option<T>) -> T {
        let mut ticks = self.shared.ticks();
        let work = async {
            loop {
                ticks.mark_unchanged();
                if let Some(found) = self.shared.look(|state| look(&View::of(state))) {
                    return found;
                }
                let _ = ticks.changed().await;
            }
        };
        match within(DEADLINE, work).await {
            Some(found) => found,
            None => panic!(
                "waited {DEADLINE:?} for {what}; the kubelet saw:\n{}",
                self.shared.story()
            ),
        }
    }

    /// Waits as [`Self::wait_for`] does, for a condition without a result.
    pub async fn wait_until(&self, what: &str, mut look: impl FnMut(&View<'_>) -> bool) {
        self.wait_for(what, |view| look(view).then_some(())).await;
    }

    /// Waits until a DRA driver is registered, has been notified, and is connected.
    pub async fn registered(&self, driver: &str) {
        self.wait_until(&format!("driver {driver}"), |view| {
            view.connected(driver) > 0
        })
        .await;
    }

    /// Waits until no instance of a DRA driver is registered.
    pub async fn deregistered(&self, driver: &str) {
        self.wait_until(&format!("the end of driver {driver}"), |view| {
            view.endpoints(driver).is_empty()
        })
        .await;
    }

    /// Waits until a device plugin has sent this many devices.
    pub async fn devices(&self, resource: &str, count: usize) -> Resource {
        let what = format!("{count} devices of {resource}");
        let found = |view: &View<'_>| {
            view.resource(resource)
                .filter(|found| found.devices.len() == count && found.running)
        };
        self.wait_for(&what, found).await
    }

    /// Calls a DRA driver as this kubelet does, also while it starts again.
    pub fn driver(&self, name: &str) -> Driver {
        Driver {
            shared: Arc::clone(&self.shared),
            name: name.to_owned(),
        }
    }

    /// Takes `count` devices of a resource for a container, as admission does, and asks their plugin to allocate them.
    pub async fn allocate(&self, resource: &str, count: usize) -> Result<Allocation, String> {
        devices::allocate(&self.shared, resource, count).await
    }

    /// Frees devices, as when their pod has ended.
    pub fn free(&self, allocation: &Allocation) {
        self.shared.change(|state| {
            state
                .allocations
                .retain(|held| held.number != allocation.number)
        });
    }
}
