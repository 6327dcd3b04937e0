//! Endpoints of device plugins: the registered plugin of each resource, and the connection to it.
//!
//! Given registrations, from the socket that plugins call and from the workers of registration sockets, it reports to a `PluginSink`
//! which plugin arrived, what it lists and why it left. Of two registrations of a resource the later one counts. It dials a lost plugin
//! again, which a kubelet leaves to the plugin. Never allocates anything, and deletes no socket.
//!
//! # Life of a device plugin
//!
//! `registering → serving ⇄ lost`. It is gone when a newer registration replaces it, when its registration socket is removed, or when its
//! own socket has been missing for five minutes.
//!
//! Both ways of registration, a call on `kubelet.sock` and a registration socket, take the same steps: check the socket, dial it, call
//! it for its options, and pass the plugin to the controller of its resource, which reports it to the device manager and watches its
//! lists. Of two registrations the later one counts, even while the earlier one is in progress.
//!
//! Differences from a kubelet: every call has a deadline; a lost plugin is dialled again (20 ms, doubled, at most 2 s); an endpoint must
//! be a socket in its directory; a response to Allocate is checked and its paths are normalized; of more than twenty lists per second
//! the newest is used; a device listed twice is healthy only if every entry says so.

mod controller;
mod location;
mod sockets;

#[cfg(test)]
pub(super) mod tests;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::grpc::{DevicePlugin, PluginTimes};
use controller::{Order, ResourceController};
pub use location::Location;
use nodedock_base::tasks::Tasks;
use nodedock_core::driver::DeviceDriver;
use nodedock_core::manager::Manager;
use nodedock_core::manager::devices::PluginId;
use nodedock_model::{ExtendedResource, PluginDevice, Problem, ProblemCode, limit};
use sockets::Accepted;

/// Device plugins that are dialled concurrently; others wait, one for each resource.
const REGISTRATIONS_AT_ONCE: usize = 16;

/// Queue of orders for a resource's controller, which executes them without waiting for a plugin.
const ORDERS_WAITING_MAX: usize = 16;

/// Receives reports about plugins. A replaced plugin causes no report but the arrival of the next one.
pub trait PluginSink: Clone + Send + Sync + 'static {
    type Id: Send + Sync;

    /// A plugin called to register; the outcome follows.
    fn plugin_called(&self, _resource: &ExtendedResource) {}

    /// A plugin is connected. It replaces the previous one of the resource.
    fn plugin_arrived(
        &self,
        resource: ExtendedResource,
        source: PathBuf,
        driver: Arc<dyn DeviceDriver>,
    ) -> Self::Id;

    /// Its newest list, which replaces the previous one.
    fn plugin_listed(&self, id: &Self::Id, devices: &[PluginDevice]);

    /// The plugin or its registration is gone. The same plugin may arrive again.
    fn plugin_left(&self, id: &Self::Id, why: &Problem);
}

impl PluginSink for Arc<Manager> {
    type Id = PluginId;

    fn plugin_called(&self, resource: &ExtendedResource) {
        Manager::plugin_called(self, resource);
    }

    fn plugin_arrived(
        &self,
        resource: ExtendedResource,
        source: PathBuf,
        driver: Arc<dyn DeviceDriver>,
    ) -> PluginId {
        Manager::plugin_arrived(self, resource, source, driver)
    }

    fn plugin_listed(&self, id: &PluginId, devices: &[PluginDevice]) {
        Manager::plugin_listed(self, id, devices);
    }

    fn plugin_left(&self, id: &PluginId, why: &Problem) {
        Manager::plugin_left(self, id, why);
    }
}

/// Handle to the endpoints. Clones share the state.
#[derive(Clone)]
pub struct Endpoints<S: PluginSink>(Arc<Shared<S>>);

struct Shared<S> {
    sink: S,
    tasks: Tasks,
    steps: PluginTimes,
    /// Permits for the steps of a registration.
    at_once: Semaphore,
    slots: Mutex<BTreeMap<ExtendedResource, Slot>>,
    /// Locked before the slots.
    accepted: Mutex<Accepted>,
}

/// State of a resource: a registration in progress, a controller, or both. Without either there is no slot.
#[derive(Default)]
struct Slot {
    /// Number of registrations; the last one counts.
    registrations: u64,
    /// Cancelled when a newer registration begins.
    attempt: Option<CancellationToken>,
    controller: Option<mpsc::Sender<Order>>,
    /// Of the controller's plugin.
    location: Option<Location>,
}

impl<S: PluginSink> Endpoints<S> {
    pub fn new(sink: S, steps: PluginTimes, tasks: Tasks) -> Self {
        let at_once = Semaphore::new(REGISTRATIONS_AT_ONCE);
        Self(Arc::new(Shared {
            sink,
            tasks,
            steps,
            at_once,
            slots: Mutex::default(),
            accepted: Mutex::default(),
        }))
    }

    /// Reports a plugin's call to register, before it is checked.
    pub fn called(&self, resource: &ExtendedResource) {
        self.0.sink.plugin_called(resource);
    }

    /// Connects to a plugin, calls it for its options, and replaces the previous plugin. Returns when the sink has the report of its
    /// arrival, which is before its first list. If a step fails the previous plugin stays.
    pub async fn register(&self, resource: &ExtendedResource, location: Location) -> Result<(), Problem> {
        self.try_register(&Attempt::begin(&self.0, resource)?, &location).await
    }

    async fn try_register(&self, attempt: &Attempt<S>, location: &Location) -> Result<(), Problem> {
        let connect = async {
            let _permit = self.0.at_once.acquire().await;
            self.0.connect(&attempt.resource, location).await
        };
        let plugin = tokio::select! {
            biased;
            // Dropping the future closes the connection, here and below.
            () = attempt.superseded.cancelled() => return Err(attempt.superseded_problem()),
            () = self.0.tasks.stopped() => return Err(stopping()),
            plugin = connect => plugin?,
        };
        let taken = self.hand_over(attempt, location.clone(), plugin)?;
        taken.await.map_err(|_| stopping())
    }

    fn hand_over(
        &self,
        attempt: &Attempt<S>,
        location: Location,
        plugin: DevicePlugin,
    ) -> Result<oneshot::Receiver<()>, Problem> {
        let mut slots = self.0.slots();
        let current = slots.get_mut(&attempt.resource).filter(|slot| slot.registrations == attempt.number);
        let slot = current.ok_or_else(|| attempt.superseded_problem())?;
        let controller = slot.controller.get_or_insert_with(|| self.spawn_controller(&attempt.resource));
        let (taken, is_taken) = oneshot::channel();
        let (plugin, number) = (Arc::new(plugin), attempt.number);
        let order = Order::Take { location: location.clone(), plugin, number, taken };
        controller.try_send(order).map_err(|_| attempt.superseded_problem())?;
        slot.location = Some(location);
        Ok(is_taken)
    }

    fn spawn_controller(&self, resource: &ExtendedResource) -> mpsc::Sender<Order> {
        let (orders, inbox) = mpsc::channel(ORDERS_WAITING_MAX);
        let controller = ResourceController::new(self.0.clone(), resource.clone());
        self.0.tasks.spawn("device-plugin", controller.run(inbox));
        orders
    }

    /// Removes the plugin of a removed registration socket. Returns false if another plugin has replaced it.
    fn end(&self, resource: &ExtendedResource, socket: &str) -> bool {
        let mut slots = self.0.slots();
        let Some(slot) = slots.get_mut(resource) else { return false };
        let is_its = |location: &mut Location| matches!(location, Location::At { registration, .. } if registration == socket);
        let is_ended = slot.location.take_if(is_its).is_some();
        if let Some(controller) = slot.controller.as_ref().filter(|_| is_ended) {
            // A controller that is stopping needs no order.
            let _ = controller.try_send(Order::End);
        }
        is_ended
    }
}

impl<S: PluginSink> Shared<S> {
    async fn connect(
        &self,
        resource: &ExtendedResource,
        location: &Location,
    ) -> Result<DevicePlugin, Problem> {
        let socket = location.resolve().await?;
        DevicePlugin::connect(resource, &socket, self.steps, &self.tasks).await
    }

    fn slots(&self) -> MutexGuard<'_, BTreeMap<ExtendedResource, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accepted(&self) -> MutexGuard<'_, Accepted> {
        self.accepted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the slot of a controller without a plugin, unless a registration is in progress. Returns true if the controller must end.
    fn end_if_idle(&self, resource: &ExtendedResource, inbox: &mpsc::Receiver<Order>) -> bool {
        // Orders are sent only under this lock.
        let mut slots = self.slots();
        let is_idle = inbox.is_empty() && slots.get(resource).is_none_or(|slot| slot.attempt.is_none());
        if is_idle {
            slots.remove(resource);
        }
        is_idle
    }
}

/// A registration in progress: the newest of its resource, until `superseded`.
struct Attempt<S: PluginSink> {
    shared: Arc<Shared<S>>,
    resource: ExtendedResource,
    number: u64,
    superseded: CancellationToken,
}

impl<S: PluginSink> Attempt<S> {
    fn begin(shared: &Arc<Shared<S>>, resource: &ExtendedResource) -> Result<Self, Problem> {
        let mut slots = shared.slots();
        if !slots.contains_key(resource) && slots.len() >= limit::PLUGIN_RESOURCES_MAX {
            let max = limit::PLUGIN_RESOURCES_MAX;
            let message = format!(
                "{resource} is not taken: device plugins have {max} resources already, the most that are served"
            );
            return Err(Problem::unavailable(ProblemCode::TooManyResources, message));
        }
        let slot = slots.entry(resource.clone()).or_default();
        slot.registrations += 1;
        let superseded = CancellationToken::new();
        if let Some(before) = slot.attempt.replace(superseded.clone()) {
            before.cancel();
        }
        let number = slot.registrations;
        Ok(Self { shared: shared.clone(), resource: resource.clone(), number, superseded })
    }

    fn superseded_problem(&self) -> Problem {
        let message = format!("a newer registration of {} came before this one was done", self.resource);
        Problem::conflict(ProblemCode::RegistrationSuperseded, message)
    }
}

impl<S: PluginSink> Drop for Attempt<S> {
    fn drop(&mut self) {
        let mut slots = self.shared.slots();
        let Some(slot) = slots.get_mut(&self.resource).filter(|slot| slot.registrations == self.number)
        else {
            return;
        };
        slot.attempt = None;
        match &slot.controller {
            // The controller may have waited for this registration. A full channel triggers a check as well.
            Some(controller) => drop(controller.try_send(Order::Look)),
            None => drop(slots.remove(&self.resource)),
        }
    }
}

fn stopping() -> Problem {
    Problem::unavailable(ProblemCode::DaemonStopping, "the daemon is about to end")
}
