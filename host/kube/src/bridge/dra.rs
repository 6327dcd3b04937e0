//! DRA drivers of the kubelet: which drivers are offered, and the two sockets of each.
//!
//! A driver is `offered → asked → registered ⇄ refused`, from the first time that it serves until it has been gone for five seconds.
//! After a start, drivers with stored names are offered before they are loaded; while the kubelet has prepared claims of a driver that
//! is gone, its sockets stay, so that the kubelet can unprepare them (`offered`).
//!
//! One task makes and removes all of these sockets, and makes missing ones again once a second. A kubelet dials a registration socket as
//! soon as it is there, and then the service's: so the service's is opened first, and the registration is closed first. Sockets stay
//! open while a driver is replaced or lost behind them.

mod health;
mod offered;
mod registration;
mod request;
mod service;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use nodedock_proto::kubelet::dra::v1::dra_plugin_server::DraPluginServer as DraV1;
use nodedock_proto::kubelet::dra::v1beta1::dra_plugin_server::DraPluginServer as DraV1beta1;
use nodedock_proto::kubelet::dra_health::v1::dra_resource_health_server::DraResourceHealthServer as HealthV1;
use nodedock_proto::kubelet::dra_health::v1alpha1::dra_resource_health_server::DraResourceHealthServer as HealthV1alpha1;
use nodedock_proto::kubelet::registration::registration_server::RegistrationServer;
use tokio::time::Instant;

use super::sockets::{ServedSocket, SocketError, make_directory, server};
use super::{Context, SocketPaths, state_file};
use nodedock_base::backoff::Backoff;
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_model::limit::{BRIDGE_LOOK_PERIOD, BRIDGE_RETRY_MAX, DRAIN, REGISTER_BYTES_MAX};
use nodedock_model::{DriverName, Problem};

pub use offered::OfferTimes;
pub use registration::{DriverBridgeStatus, Registration};

pub(super) use health::HealthService;
use offered::OfferedNames;
pub(super) use registration::OfferedDriver;
use service::DraService;

/// The kubelet's directories are not as they should be, by the kubelet's root.
const NO_DIRECTORY: &str = "kubelet-folder";
/// A driver's sockets are not as they should be, by the driver's name.
const NO_SOCKET: &str = "kubelet-socket";
/// A little less than what the whole daemon has.
const DRAIN_OF_SOCKETS: Duration = DRAIN.saturating_sub(Duration::from_secs(1));

/// Makes the sockets of the offered drivers as they should be.
pub(super) struct DriverController {
    context: Arc<Context>,
    offered: OfferedNames,
    sockets: BTreeMap<DriverName, DriverSockets>,
    /// The names that the file has.
    saved: Option<BTreeSet<DriverName>>,
}

impl DriverController {
    pub(super) fn new(context: Arc<Context>) -> Self {
        let remembered = state_file::load_drivers(&context.parts.drivers_file).unwrap_or_else(|error| {
            tracing::warn!(error = chain(&error), "drivers are offered when they serve");
            Vec::new()
        });
        let remembered = remembered.into_iter().chain(context.claims.prepared_drivers());
        let offered = OfferedNames::new(context.parts.times.offers, remembered, Instant::now());
        Self { context, offered, sockets: BTreeMap::new(), saved: None }
    }

    pub(super) async fn run(mut self) {
        let (parts, changing) = (&self.context.parts, self.context.changing.stopped());
        let (stopped, period) = (parts.tasks.stopped(), parts.times.look_period);
        let (mut serving, mut freed) = (parts.registry.serving_changes(), parts.registry.freed_changes());
        tokio::pin!(stopped, changing);
        loop {
            serving.mark_unchanged();
            freed.mark_unchanged();
            self.reconcile().await;
            tokio::select! {
                () = &mut changing => break,
                // A change that is missed here is seen in the next round.
                _ = serving.changed() => {}
                _ = freed.changed() => {}
                () = tokio::time::sleep(period) => {}
            }
        }
        stopped.await;
        self.close().await;
    }

    async fn reconcile(&mut self) {
        let (here, claims) = (self.context.parts.registry.names(), &self.context.claims);
        let offered = self.offered.update(&here, || claims.prepared_drivers(), Instant::now());
        self.withdraw_all_but(&offered);
        if self.has_directories() {
            for driver in &offered {
                let new = || DriverSockets::new(self.context.clone(), driver.clone());
                self.sockets.entry(driver.clone()).or_insert_with(new).reconcile().await;
            }
        }
        *self.context.drivers() = self.sockets.values().map(|sockets| sockets.driver.clone()).collect();
        self.save(offered).await;
        self.context.looks.send_modify(|count| *count += 1);
    }

    fn withdraw_all_but(&mut self, offered: &BTreeSet<DriverName>) {
        for (driver, sockets) in self.sockets.extract_if(.., |driver, _| !offered.contains(driver)) {
            tracing::info!(%driver, "withdrawn from the kubelet");
            self.context.parts.tasks.spawn("bridge-withdrawn", drained(sockets.withdraw()));
        }
    }

    /// Makes the directories below the kubelet's root, as the kubelet does. The root is the kubelet's to make: there may be none here.
    fn has_directories(&self) -> bool {
        let directories = &self.context.directories;
        let root = directories.root();
        let made = match std::fs::metadata(root) {
            Err(source) => Err(SocketError::Directory { path: root.to_owned(), source }),
            Ok(_) => {
                make_directory(&directories.registry()).and_then(|()| make_directory(&directories.plugins()))
            }
        };
        let (conditions, subject) = (&self.context.parts.conditions, root.to_string_lossy());
        match &made {
            Ok(()) => conditions.clear(NO_DIRECTORY, &subject),
            Err(error) => {
                let message = format!("no driver can be offered to the kubelet: {}", chain(error));
                conditions.set(&subject, Problem::unavailable(NO_DIRECTORY, message));
            }
        }
        made.is_ok()
    }

    async fn save(&mut self, offered: BTreeSet<DriverName>) {
        if self.saved.as_ref() == Some(&offered) {
            return;
        }
        let parts = &self.context.parts;
        let (path, names) = (parts.drivers_file.clone(), offered.clone());
        let write = move || state_file::save_drivers(&path, &names);
        let consequence = "after a restart drivers are offered when they serve";
        if state_file::save(&parts.conditions, &parts.drivers_file, consequence, write).await {
            self.saved = Some(offered);
        }
    }

    /// Closes everything, every registration before the services.
    async fn close(mut self) {
        let registrations = self.sockets.values_mut().map(|sockets| sockets.registration.take());
        let mut closed: Vec<_> = registrations.flatten().map(ServedSocket::close).collect();
        let services = self.sockets.values_mut().map(|sockets| sockets.service.take());
        closed.extend(services.flatten().map(ServedSocket::close));
        self.context.drivers().clear();
        self.context.looks.send_modify(|count| *count += 1);
        drained(closed).await;
    }
}

/// A driver's two sockets.
struct DriverSockets {
    driver: Arc<OfferedDriver>,
    service: Option<ServedSocket>,
    registration: Option<ServedSocket>,
    retry_at: Option<Instant>,
    backoff: Backoff,
}

impl DriverSockets {
    fn new(context: Arc<Context>, name: DriverName) -> Self {
        let driver = Arc::new(OfferedDriver::new(name, context));
        let backoff = Backoff::new(BRIDGE_LOOK_PERIOD, BRIDGE_RETRY_MAX);
        Self { driver, service: None, registration: None, retry_at: None, backoff }
    }

    /// Opens each socket that is not open, or was removed.
    async fn reconcile(&mut self) {
        let driver = self.driver.clone();
        let Some(paths) = &driver.paths else { return };
        if self.retry_at.is_some_and(|at| Instant::now() < at) {
            return;
        }
        match self.open(paths).await {
            Ok(()) => {
                self.backoff.reset();
                self.retry_at = None;
                driver.set_open(Ok(()));
            }
            Err(error) => {
                self.retry_at = Some(Instant::now() + self.backoff.delay());
                driver.set_open(Err((chain(&error), self.service.is_some() && self.registration.is_some())));
            }
        }
    }

    async fn open(&mut self, paths: &SocketPaths) -> Result<(), SocketError> {
        let (driver, all) = (self.driver.clone(), self.driver.context.metrics.connections.clone());
        if !is_present(self.service.as_ref()) {
            if let Some(directory) = paths.service.parent() {
                make_directory(directory)?;
            }
            let tasks = Tasks::new();
            let dra = DraService(driver.clone());
            let health = HealthService { driver: driver.clone(), tasks: tasks.clone() };
            let router = server()
                .add_service(DraV1::new(dra.clone()))
                .add_service(DraV1beta1::new(dra))
                .add_service(HealthV1::new(health.clone()))
                .add_service(HealthV1alpha1::new(health));
            let connections = vec![driver.connections.clone(), all.clone()];
            let opened =
                ServedSocket::open("kubelet-service", &paths.service, router, connections, tasks).await?;
            log_opened(&driver.name, "service", self.service.replace(opened).is_some());
        }
        if !is_present(self.registration.as_ref()) {
            let registration = RegistrationServer::from_arc(driver.clone());
            let router = server().add_service(registration.max_decoding_message_size(REGISTER_BYTES_MAX));
            let (path, tasks) = (&paths.registration, Tasks::new());
            let opened = ServedSocket::open("kubelet-registration", path, router, vec![all], tasks).await?;
            log_opened(&driver.name, "registration", self.registration.replace(opened).is_some());
            driver.reset_registration();
        }
        Ok(())
    }

    /// Closes what is offered no more, and leaves nothing of it. The tasks end with the calls under way.
    fn withdraw(mut self) -> Vec<Tasks> {
        let sockets = [self.registration.take(), self.service.take()];
        let closed = sockets.into_iter().flatten().map(ServedSocket::close).collect();
        if let Some(directory) = self.driver.paths.as_ref().and_then(|paths| paths.service.parent()) {
            // It may have files of others in it, or be gone.
            let _ = std::fs::remove_dir(directory);
        }
        self.driver.reset_registration();
        self.driver.context.parts.conditions.clear(NO_SOCKET, self.driver.name.as_str());
        closed
    }
}

fn log_opened(driver: &DriverName, socket: &'static str, again: bool) {
    if again {
        tracing::warn!(%driver, socket, "a socket in the kubelet's directories was removed, it is made again");
    } else {
        tracing::info!(%driver, socket, "offered to the kubelet");
    }
}

fn is_present(socket: Option<&ServedSocket>) -> bool {
    socket.is_some_and(ServedSocket::is_present)
}

/// Waits for what is under way on closed sockets.
async fn drained(closed: Vec<Tasks>) {
    let all = futures::future::join_all(closed.iter().map(|tasks| tasks.drain(DRAIN_OF_SOCKETS))).await;
    if !all.into_iter().all(|ended| ended) {
        tracing::warn!("calls of the kubelet were still under way when their sockets were closed");
    }
}
