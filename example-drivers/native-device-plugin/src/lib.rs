//! A native device plugin without hardware, which does only what every such plugin must do.
//!
//! A plugin serves `v1beta1.DevicePlugin` on its own socket and registers: it calls `Register` on `kubelet.sock`, or creates a
//! registration socket in a directory that the node's agent watches. The owner of the `Plugin` decides what it lists and answers, so
//! that tests can make it answer wrongly, late or not at all.

mod options;
mod register;
mod script;
mod services;

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use native_null::incoming::{self, Incoming};
use nodedock_proto::kubelet::device_plugin::v1beta1::device_plugin_server::DevicePluginServer;
use nodedock_proto::kubelet::registration::registration_server::RegistrationServer;
use tokio::sync::{broadcast, mpsc};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::transport::Server;
use tonic::transport::server::Router;

pub use nodedock_proto::kubelet::device_plugin::v1beta1 as api;
pub use options::{KUBELET_SOCKET, Options, Register};
pub use script::{Choice, Device, Script, ScriptedOutcome};

/// An event of the plugin, for tests to wait for.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    Registered,
    Refused {
        why: String,
    },
    OptionsAsked,
    /// A client started to watch its devices.
    ListWatched,
    Allocate {
        devices: Vec<String>,
        request_id: Option<String>,
        deadline: Option<String>,
    },
    Preferred(Choice),
    PreStart {
        devices: Vec<String>,
    },
}

/// Capacity of the event queue; further events are dropped.
const EVENTS_WAITING_MAX: usize = 1024;
/// Number of lists that a slow reader may lag.
const LISTS_BEHIND_MAX: usize = 1024;

/// A running plugin. Dropping it stops it.
pub struct Plugin {
    shared: Arc<PluginState>,
    events: tokio::sync::Mutex<mpsc::Receiver<Event>>,
    service_stop: Mutex<CancellationToken>,
}

type List = Arc<api::ListAndWatchResponse>;

pub(crate) struct PluginState {
    pub(crate) options: Options,
    script: Mutex<Script>,
    /// `None`: it has not listed yet.
    list: Mutex<Option<List>>,
    later_lists: broadcast::Sender<Result<List, Status>>,
    events: mpsc::Sender<Event>,
    /// Stops all tasks at once.
    pub(crate) died: CancellationToken,
}

impl PluginState {
    pub(crate) fn tell(&self, event: Event) {
        // The events need no receiver.
        let _ = self.events.try_send(event);
    }

    pub(crate) fn script(&self) -> Script {
        lock(&self.script).clone()
    }

    /// Returns the current list and a stream of later ones.
    pub(crate) fn lists(&self) -> (Option<List>, broadcast::Receiver<Result<List, Status>>) {
        let now = lock(&self.list);
        (now.clone(), self.later_lists.subscribe())
    }
}

impl Plugin {
    /// Serves, then registers: in this order, because the agent calls the plugin before it answers.
    pub async fn start(
        options: Options,
        script: Script,
        devices: Vec<Device>,
    ) -> Result<Self, Status> {
        let plugin = Self::unregistered(options, script)?;
        plugin.list(devices);
        plugin.register().await?;
        Ok(plugin)
    }

    /// Serves without a registration and without a list.
    pub fn unregistered(options: Options, script: Script) -> io::Result<Self> {
        let (sender, events) = mpsc::channel(EVENTS_WAITING_MAX);
        let shared = Arc::new(PluginState {
            options,
            script: Mutex::new(script),
            list: Mutex::new(None),
            later_lists: broadcast::Sender::new(LISTS_BEHIND_MAX),
            events: sender,
            died: CancellationToken::new(),
        });
        let events = tokio::sync::Mutex::new(events);
        let plugin = Self {
            shared,
            events,
            service_stop: Mutex::new(CancellationToken::new()),
        };
        plugin.serve()?;
        Ok(plugin)
    }

    /// Serves on the plugin's socket; replaces an earlier service.
    pub fn serve(&self) -> io::Result<()> {
        let stop = self.shared.died.child_token();
        std::mem::replace(&mut *lock(&self.service_stop), stop.clone()).cancel();
        let incoming = incoming::listen(&self.options().socket(), &stop)?;
        let service = DevicePluginServer::new(services::DevicePlugin(self.shared.clone()));
        tokio::spawn(run(Server::builder().add_service(service), incoming, stop));
        Ok(())
    }

    /// Registers in the way that the options select. On a registration socket the agent's answer arrives as an event.
    pub async fn register(&self) -> Result<(), Status> {
        let options = self.options();
        if let Some(socket) = options.registration_socket() {
            let stop = self.shared.died.child_token();
            let incoming = incoming::listen(&socket, &stop)?;
            let service = RegistrationServer::new(services::Registration(self.shared.clone()));
            tokio::spawn(run(Server::builder().add_service(service), incoming, stop));
            return Ok(());
        }
        let request = api::RegisterRequest {
            version: options.version(),
            endpoint: options
                .said_endpoint
                .clone()
                .unwrap_or_else(|| options.endpoint.clone()),
            resource_name: options.name(),
            options: None,
        };
        register::register(&options.kubelet_socket(), request).await?;
        self.tell(Event::Registered);
        Ok(())
    }

    /// Removes the sockets, as a plugin does on a clean stop.
    pub fn remove_sockets(&self) -> io::Result<()> {
        let options = self.options();
        for socket in options
            .registration_socket()
            .into_iter()
            .chain([options.socket()])
        {
            match std::fs::remove_file(socket) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Sets the listed devices.
    pub fn list(&self, devices: Vec<Device>) {
        self.list_raw(devices.iter().map(Device::listed).collect());
    }

    /// Sets the listed devices, as messages of the API.
    pub fn list_raw(&self, devices: Vec<api::Device>) {
        let list = Arc::new(api::ListAndWatchResponse { devices });
        let mut now = lock(&self.shared.list);
        *now = Some(list.clone());
        // The lists need no watcher.
        let _ = self.shared.later_lists.send(Ok(list));
    }

    /// Ends the open streams of lists with an error; new streams work as before.
    pub fn fail_lists(&self, status: Status) {
        let _ = self.shared.later_lists.send(Err(status));
    }

    pub fn set_script(&self, script: Script) {
        *lock(&self.shared.script) = script;
    }

    /// Stops the service with all its connections; the socket file stays.
    pub fn disconnect(&self) {
        lock(&self.service_stop).cancel();
    }

    /// Stops everything as a crash does: connections break, socket files stay.
    pub fn die(&self) {
        self.shared.died.cancel();
    }

    /// Waits for the next event.
    pub async fn event(&self) -> Event {
        match self.events.lock().await.recv().await {
            Some(event) => event,
            None => std::future::pending().await,
        }
    }

    pub fn options(&self) -> &Options {
        &self.shared.options
    }

    pub(crate) fn tell(&self, event: Event) {
        self.shared.tell(event);
    }

    pub(crate) async fn died(&self) {
        self.shared.died.cancelled().await;
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        self.die();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves until it is stopped: connections and their calls then break at once.
async fn run(router: Router, incoming: Incoming, stop: CancellationToken) {
    tokio::select! {
        served = router.serve_with_incoming(incoming) => if let Err(error) = served {
            eprintln!("native-device-plugin: {error}");
        },
        () = stop.cancelled() => {}
    }
}
