//! DRA drivers of the kubelet: which drivers are offered, and the two sockets of each.
//!
//! A driver is `offered → asked → registered ⇄ refused`, from the first time that it serves until it has been gone for half a minute.
//! After a start, drivers with stored names are offered before they are loaded; while the kubelet has prepared claims of a driver that
//! is gone, its sockets stay, so that the kubelet can unprepare them (`offered`). Sockets that outlived the process before are adopted:
//! for the kubelet nothing has changed. Without these, each process start has sockets of its own, and those of the one before are removed
//! when the kubelet has registered the new ones.
//!
//! One task creates and removes all of these sockets, and creates missing ones again once a second. A kubelet dials a registration socket
//! as soon as it is there, and then the service's: so the service's is opened first, and the registration is closed first. Sockets stay
//! open while a driver is replaced or lost behind them.

pub(super) mod health;
mod offered;
mod registration;
mod request;
pub(super) mod service;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use nodedock_proto::kubelet::dra::v1::dra_plugin_server::DraPluginServer as DraV1;
use nodedock_proto::kubelet::dra::v1beta1::dra_plugin_server::DraPluginServer as DraV1beta1;
use nodedock_proto::kubelet::dra_health::v1::dra_resource_health_server::DraResourceHealthServer as HealthV1;
use nodedock_proto::kubelet::dra_health::v1alpha1::dra_resource_health_server::DraResourceHealthServer as HealthV1alpha1;
use nodedock_proto::kubelet::registration::registration_server::RegistrationServer;
use tokio::time::Instant;
use tonic::service::Routes;

use super::sockets::{ServedSocket, SocketError, make_directory};
use super::{BRIDGE_DRIVERS_MAX, BRIDGE_LOOK_PERIOD, BRIDGE_RETRY_MAX, Context, SocketPaths};
use nodedock_base::backoff::Backoff;
use nodedock_base::device_plugin_sockets::socket_id;
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_core::checkpoint::StoredRecords;
use nodedock_model::limit::{DRAIN, REGISTER_BYTES_MAX};
use nodedock_model::{DriverName, DriverOffer, Problem, ProblemCode};

pub use registration::{DriverBridgeStatus, Registration};

pub(super) use health::HealthService;
use offered::OfferedNames;
pub(super) use registration::OfferedDriver;

/// Concurrent streams of one driver's health: a kubelet has one.
pub(crate) const BRIDGE_HEALTH_STREAMS_MAX: usize = 8;

/// A little less than what the whole daemon has.
const DRAIN_OF_SOCKETS: Duration = DRAIN.saturating_sub(Duration::from_secs(1));

/// Time after the start after which sockets of earlier starts are removed, though no kubelet has registered the new ones.
const STALE_WAIT: Duration = Duration::from_secs(30);

/// Keeps the sockets of the offered drivers as they should be.
struct DriverController {
    context: Arc<Context>,
    offered: OfferedNames,
    sockets: BTreeMap<DriverName, DriverSockets>,
    /// Offers from before this start, as far as they are still relevant.
    before: BTreeMap<DriverName, DriverOffer>,
    stored: StoredRecords<DriverName, DriverOffer>,
}

/// Offers drivers until the tasks stop.
pub(super) async fn offer(context: Arc<Context>) {
    let parts = &context.parts;
    let before: BTreeMap<_, _> = parts
        .offered_before
        .drivers
        .iter()
        .map(|offer| (offer.driver.clone(), offer.clone()))
        .collect();
    let stored = StoredRecords::new(parts.checkpoint.clone(), before.clone());
    let remembered = before.keys().cloned().chain(context.prepared_drivers());
    let offered = OfferedNames::new(parts.times, remembered, Instant::now());
    DriverController {
        context,
        offered,
        sockets: BTreeMap::new(),
        before,
        stored,
    }
    .run()
    .await;
}

impl DriverController {
    async fn run(mut self) {
        let (parts, changing) = (
            &self.context.parts,
            self.context.handover.changing.stopped(),
        );
        let (stopped, period) = (parts.tasks.stopped(), parts.times.look_period);
        let (mut serving, mut freed) = (
            parts.registry.instances.changes(),
            parts.registry.names.changes(),
        );
        tokio::pin!(changing);
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
        let leave = self.context.parts.listeners.outlive_a_stop();
        let closed = self
            .sockets
            .values_mut()
            .flat_map(|sockets| sockets.close(leave))
            .collect();
        // Resources refer to the context, which refers to them.
        self.context.drivers.lock().clear();
        self.context.resources.lock().clear();
        self.context.looks.send();
        drained(closed).await;
    }

    async fn reconcile(&mut self) {
        let context = &self.context;
        let here = context.parts.registry.driver_names();
        let offered = self
            .offered
            .update(&here, || context.prepared_drivers(), Instant::now());
        for (driver, sockets) in self
            .sockets
            .extract_if(.., |driver, _| !offered.contains(driver))
        {
            tracing::info!(%driver, "withdrawn from the kubelet");
            context
                .parts
                .tasks
                .spawn("bridge-withdrawn", drained(sockets.withdraw()));
        }
        if has_directories(context) {
            for driver in &offered {
                let registered = self
                    .before
                    .get(driver)
                    .is_some_and(|before| before.registered);
                self.sockets
                    .entry(driver.clone())
                    .or_insert_with(|| {
                        DriverSockets::new(context.clone(), driver.clone(), registered)
                    })
                    .reconcile()
                    .await;
            }
        }
        *context.drivers.lock() = self
            .sockets
            .values()
            .map(|sockets| sockets.driver.clone())
            .collect();
        self.remove_stale();
        let now = offered.into_iter().take(BRIDGE_DRIVERS_MAX).map(|driver| {
            let sockets = self.sockets.get(&driver);
            let registered = sockets.is_some_and(DriverSockets::is_registered);
            let mut starts = self
                .before
                .get(&driver)
                .map(|before| before.starts.clone())
                .unwrap_or_default();
            starts.insert(self.context.directories.start().to_owned());
            let offer = DriverOffer {
                driver: driver.clone(),
                starts,
                registered,
            };
            (driver, offer)
        });
        let now = now.collect();
        if let Err(error) = self.stored.save(&now).await {
            // The checkpoint reports that it takes no writes; the next round saves again.
            tracing::debug!(error = chain(&error), "offered drivers are not stored yet");
        }
        self.context.looks.send();
    }

    /// Removes sockets of earlier starts as soon as the kubelet has registered this one's: it calls the newest that is connected.
    fn remove_stale(&mut self) {
        let context = &self.context;
        let is_late = Instant::now() >= context.started + STALE_WAIT;
        for (driver, before) in &mut self.before {
            let own = self
                .sockets
                .get(driver)
                .map(|sockets| sockets.driver.status().registration);
            let is_awaited =
                own.is_some_and(|own| matches!(own, Registration::Offered | Registration::Asked));
            if is_awaited && !is_late {
                continue;
            }
            for start in std::mem::take(&mut before.starts) {
                if start != context.directories.start() {
                    remove_sockets(&context.directories.of_driver(driver, &start));
                }
            }
        }
    }
}

/// Removes sockets of another start. A process that still has them open, such as an instance that is on standby, does not accept.
fn remove_sockets(paths: &SocketPaths) {
    for path in [&paths.registration, &paths.service] {
        if socket_id(path).is_some() {
            tracing::info!(socket = %path.display(), "removed: a process that ended has left it");
            // It may be gone by now.
            let _ = std::fs::remove_file(path);
        }
    }
    if let Some(directory) = paths.service.parent() {
        // It may have files of others in it, or be gone.
        let _ = std::fs::remove_dir(directory);
    }
}

/// Creates the directories below the kubelet's root, as the kubelet does. It creates the root itself: there may be none here.
fn has_directories(context: &Context) -> bool {
    let directories = &context.directories;
    let root = &directories.root;
    let found = std::fs::metadata(root).map_err(|source| SocketError::Directory {
        path: root.clone(),
        source,
    });
    let made = found
        .and_then(|_| make_directory(&directories.registry))
        .and_then(|()| make_directory(&directories.plugins));
    let code = ProblemCode::KubeletFolder;
    let problem = made.as_ref().err().map(|error| {
        Problem::unavailable(
            code,
            format!("no driver can be offered to the kubelet: {}", chain(error)),
        )
    });
    context
        .parts
        .conditions
        .update(code, &root.to_string_lossy(), problem);
    made.is_ok()
}

/// A driver's two sockets.
struct DriverSockets {
    driver: Arc<OfferedDriver>,
    /// The kubelet has registered it by sockets that outlived the process before.
    registered: bool,
    service: Option<ServedSocket>,
    registration: Option<ServedSocket>,
    retry_at: Instant,
    backoff: Backoff,
}

impl DriverSockets {
    fn new(context: Arc<Context>, name: DriverName, registered: bool) -> Self {
        let driver = Arc::new(OfferedDriver::new(name, context));
        let backoff = Backoff::new(BRIDGE_LOOK_PERIOD, BRIDGE_RETRY_MAX);
        Self {
            driver,
            registered,
            service: None,
            registration: None,
            retry_at: Instant::now(),
            backoff,
        }
    }

    /// Opens each socket that is not open, or was removed.
    async fn reconcile(&mut self) {
        let driver = self.driver.clone();
        if Instant::now() < self.retry_at {
            return;
        }
        match self.open().await {
            Ok(()) => {
                self.backoff.reset();
                driver.set_open(None, true);
            }
            Err(error) => {
                self.retry_at = Instant::now() + self.backoff.delay();
                driver.set_open(
                    Some(chain(&error)),
                    self.service.is_some() && self.registration.is_some(),
                );
            }
        }
    }

    async fn open(&mut self) -> Result<(), SocketError> {
        let driver = self.driver.clone();
        let (paths, context) = (&driver.paths, &*driver.context);
        let all = context.metrics.connections.clone();
        if !self.service.as_ref().is_some_and(ServedSocket::is_present) {
            if let Some(directory) = paths.service.parent() {
                make_directory(directory)?;
            }
            let tasks = Tasks::new();
            let health = HealthService {
                driver: driver.clone(),
                tasks: tasks.clone(),
            };
            let routes = Routes::new(DraV1::from_arc(driver.clone()))
                .add_service(DraV1beta1::from_arc(driver.clone()))
                .add_service(HealthV1::new(health.clone()))
                .add_service(HealthV1alpha1::new(health));
            let connections = vec![driver.connections.clone(), all.clone()];
            let opened = ServedSocket::open(
                "kubelet-service",
                &paths.service,
                routes,
                connections,
                context.sockets(),
                tasks,
            )
            .await?;
            log_opened(&driver.name, "service", &opened, self.service.is_some());
            self.service = Some(opened);
        }
        if !self
            .registration
            .as_ref()
            .is_some_and(ServedSocket::is_present)
        {
            let registration = RegistrationServer::from_arc(driver.clone());
            let routes = Routes::new(registration.max_decoding_message_size(REGISTER_BYTES_MAX));
            let (path, tasks) = (&paths.registration, Tasks::new());
            let opened = ServedSocket::open(
                "kubelet-registration",
                path,
                routes,
                vec![all],
                context.sockets(),
                tasks,
            )
            .await?;
            log_opened(
                &driver.name,
                "registration",
                &opened,
                self.registration.is_some(),
            );
            let is_known = self.registered && opened.adopted;
            driver.set_registration(if is_known {
                Registration::Registered
            } else {
                Registration::Offered
            });
            self.registration = Some(opened);
        }
        Ok(())
    }

    fn is_registered(&self) -> bool {
        self.driver.status().registration == Registration::Registered
    }

    /// Closes the sockets, and leaves them where they are or removes them. The tasks end with the calls under way.
    fn close(&mut self, leave: bool) -> Vec<Tasks> {
        let sockets = [self.registration.take(), self.service.take()]
            .into_iter()
            .flatten();
        sockets
            .map(if leave {
                ServedSocket::leave
            } else {
                ServedSocket::close
            })
            .collect()
    }

    /// Closes what is offered no more, and leaves nothing of it.
    fn withdraw(mut self) -> Vec<Tasks> {
        let closed = self.close(false);
        if let Some(directory) = self.driver.paths.service.parent() {
            // It may have files of others in it, or be gone.
            let _ = std::fs::remove_dir(directory);
        }
        self.driver.set_registration(Registration::Offered);
        self.driver
            .conditions()
            .clear(ProblemCode::KubeletSocket, self.driver.name.as_str());
        closed
    }
}

fn log_opened(driver: &DriverName, socket: &'static str, opened: &ServedSocket, again: bool) {
    if opened.adopted {
        tracing::info!(%driver, socket, "offered to the kubelet by a socket that was open before");
    } else if again {
        tracing::warn!(%driver, socket, "a socket in the kubelet's directories was removed, it is created again");
    } else {
        tracing::info!(%driver, socket, "offered to the kubelet");
    }
}

/// Waits for what is under way on closed sockets.
async fn drained(closed: Vec<Tasks>) {
    let all =
        futures::future::join_all(closed.iter().map(|tasks| tasks.drain(DRAIN_OF_SOCKETS))).await;
    if !all.into_iter().all(|ended| ended) {
        tracing::warn!("calls of the kubelet were still under way when their sockets were closed");
    }
}
