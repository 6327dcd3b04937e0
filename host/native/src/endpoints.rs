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
//! Both ways of registration, a call on `kubelet.sock` and a registration socket, leave the registration in the slot of its resource,
//! whose controller takes the same steps: it checks the socket, dials it, calls it for its options, reports the plugin to the device
//! manager and watches its lists. Of two registrations the later one counts, even while the earlier one is in progress.
//!
//! Differences from a kubelet: every call has a deadline; a lost plugin is dialled again (20 ms, doubled, at most 2 s); an endpoint must
//! be a socket in its directory; a response to Allocate is checked and its paths are normalized; of more than twenty lists per second
//! the newest is used; a device listed twice is healthy only if every entry says so.

mod controller;
mod location;

#[cfg(test)]
pub(super) mod tests;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, Semaphore, oneshot};

use crate::grpc::{DevicePlugin, PluginTimes, Tap};
use controller::ResourceController;
pub use location::Location;
use nodedock_base::tasks::Tasks;
use nodedock_core::driver::DeviceDriver;
use nodedock_core::manager::devices::{Devices, PluginId};
use nodedock_core::recording::Recordings;
use nodedock_model::{ExtendedResource, PluginDevice, Problem, ProblemCode, limit};

/// Device plugins that are dialled concurrently; others wait, one for each resource.
const REGISTRATIONS_AT_ONCE: usize = 16;

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

impl PluginSink for Arc<Devices> {
    type Id = PluginId;

    fn plugin_called(&self, resource: &ExtendedResource) {
        Devices::plugin_called(self, resource);
    }

    fn plugin_arrived(
        &self,
        resource: ExtendedResource,
        source: PathBuf,
        driver: Arc<dyn DeviceDriver>,
    ) -> PluginId {
        Devices::plugin_arrived(self, resource, source, driver)
    }

    fn plugin_listed(&self, id: &PluginId, devices: &[PluginDevice]) {
        Devices::plugin_listed(self, id, devices);
    }

    fn plugin_left(&self, id: &PluginId, why: &Problem) {
        Devices::plugin_left(self, id, why);
    }
}

/// Handle to the endpoints. Clones share the state.
#[derive(Clone)]
pub struct Endpoints<S: PluginSink>(Arc<EndpointsState<S>>);

struct EndpointsState<S> {
    sink: S,
    tasks: Tasks,
    steps: PluginTimes,
    recordings: Recordings,
    /// Permits for the steps of a registration.
    at_once: Semaphore,
    slots: Mutex<BTreeMap<ExtendedResource, Slot>>,
}

/// Work of the controller of a resource. Without a controller there is no slot.
#[derive(Default)]
struct Slot {
    /// The newest registration, until the controller begins it.
    next: Option<Registration>,
    /// Endpoint of each accepted plugin, by the path of its registration socket.
    accepted: BTreeMap<String, PathBuf>,
    changed: Arc<Notify>,
}

struct Registration {
    location: Location,
    /// Gets the outcome; dropped when a newer registration begins. `None`: attempts are repeated until one succeeds.
    done: Option<oneshot::Sender<Result<(), Problem>>>,
}

impl<S: PluginSink> Endpoints<S> {
    pub fn new(sink: S, steps: PluginTimes, recordings: Recordings, tasks: Tasks) -> Self {
        let at_once = Semaphore::new(REGISTRATIONS_AT_ONCE);
        Self(Arc::new(EndpointsState {
            sink,
            tasks,
            steps,
            recordings,
            at_once,
            slots: Mutex::default(),
        }))
    }

    /// Reports a plugin's call to register, before it is checked.
    pub fn called(&self, resource: &ExtendedResource) {
        self.0.sink.plugin_called(resource);
    }

    /// Connects to a plugin, calls it for its options, and replaces the previous plugin. Returns when the sink has the report of its
    /// arrival, which is before its first list. If a step fails the previous plugin stays.
    pub async fn register(
        &self,
        resource: &ExtendedResource,
        location: Location,
    ) -> Result<(), Problem> {
        let (done, outcome) = oneshot::channel();
        self.begin(
            &mut self.0.slots(),
            resource,
            Registration {
                location,
                done: Some(done),
            },
        )?;
        tokio::select! {
            biased;
            () = self.0.tasks.stopped() => Err(stopping()),
            // If the caller is cancelled, the controller ends the registration.
            outcome = outcome => outcome.unwrap_or_else(|_| Err(superseded(resource))),
        }
    }

    /// Registers a plugin that was accepted on a registration socket, as soon as it can be connected. It replaces another plugin of the
    /// socket; the same plugin again changes nothing.
    pub fn accept(
        &self,
        socket: &str,
        resource: &ExtendedResource,
        endpoint: PathBuf,
    ) -> Result<(), Problem> {
        let mut slots = self.0.slots();
        if slots
            .get(resource)
            .is_some_and(|slot| slot.accepted.get(socket) == Some(&endpoint))
        {
            return Ok(());
        }
        withdraw(&mut slots, socket);
        let location = Location::At {
            endpoint: endpoint.clone(),
            registration: socket.to_owned(),
        };
        let slot = self.begin(
            &mut slots,
            resource,
            Registration {
                location,
                done: None,
            },
        )?;
        slot.accepted.insert(socket.to_owned(), endpoint);
        Ok(())
    }

    /// Ends the plugin that was accepted on a registration socket, if there is one. Another plugin that is accepted for the resource
    /// takes over.
    pub fn withdraw(&self, socket: &str) {
        withdraw(&mut self.0.slots(), socket);
    }

    /// Passes a registration to the controller of the resource.
    fn begin<'a>(
        &self,
        slots: &'a mut BTreeMap<ExtendedResource, Slot>,
        resource: &ExtendedResource,
        registration: Registration,
    ) -> Result<&'a mut Slot, Problem> {
        let max = limit::PLUGIN_RESOURCES_MAX;
        if !slots.contains_key(resource) && slots.len() >= max {
            let message = format!(
                "{resource} is not taken: device plugins have {max} resources already, the most that are served"
            );
            return Err(Problem::unavailable(ProblemCode::TooManyResources, message));
        }
        let slot = slots.entry(resource.clone()).or_insert_with(|| {
            let slot = Slot::default();
            let controller = ResourceController::new(self.0.clone(), resource.clone());
            // Safe to drop: plugins register with the next daemon.
            self.0
                .tasks
                .spawn_until_stopped("device-plugin", controller.run(slot.changed.clone()));
            slot
        });
        slot.next = Some(registration);
        slot.changed.notify_one();
        Ok(slot)
    }
}

fn withdraw(slots: &mut BTreeMap<ExtendedResource, Slot>, socket: &str) {
    for slot in slots.values_mut() {
        if slot.accepted.remove(socket).is_some() {
            slot.changed.notify_one();
        }
    }
}

impl<S: PluginSink> EndpointsState<S> {
    async fn connect(
        &self,
        resource: &ExtendedResource,
        location: &Location,
    ) -> Result<DevicePlugin, Problem> {
        let socket = location.resolve().await?;
        let tap = Tap::new(&self.recordings, resource.as_str());
        DevicePlugin::connect(resource, &socket, self.steps, tap, &self.tasks).await
    }

    fn slots(&self) -> MutexGuard<'_, BTreeMap<ExtendedResource, Slot>> {
        self.slots.lock()
    }

    /// Ends the slot of a controller without work, unless there is new work. Returns true if the controller must end.
    fn end_if_idle(&self, resource: &ExtendedResource) -> bool {
        let mut slots = self.slots();
        let is_idle = !slots
            .get(resource)
            .is_some_and(|slot| slot.next.is_some() || !slot.accepted.is_empty());
        if is_idle {
            slots.remove(resource);
        }
        is_idle
    }
}

fn superseded(resource: &ExtendedResource) -> Problem {
    let message = format!("a newer registration of {resource} came before this one was done");
    Problem::conflict(ProblemCode::RegistrationSuperseded, message)
}

fn stopping() -> Problem {
    Problem::unavailable(ProblemCode::DaemonStopping, "the daemon is about to end")
}
