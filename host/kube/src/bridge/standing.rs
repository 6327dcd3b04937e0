//! One driver's two sockets: opened, opened anew when somebody removed them, and closed.
//!
//! A kubelet dials a registration socket as soon as it is there, and then the service's. So the service's is opened first, and the
//! registration is closed first.

use std::sync::Arc;
use std::time::Duration;

use nodedock_proto::kubelet::dra::v1::dra_plugin_server::DraPluginServer as DraV1;
use nodedock_proto::kubelet::dra::v1beta1::dra_plugin_server::DraPluginServer as DraV1beta1;
use nodedock_proto::kubelet::dra_health::v1::dra_resource_health_server::DraResourceHealthServer as HealthV1;
use nodedock_proto::kubelet::dra_health::v1alpha1::dra_resource_health_server::DraResourceHealthServer as HealthV1alpha1;
use tokio::net::UnixListener;
use tokio::time::Instant;
use tonic::transport::Server;
use tonic::transport::server::Router;

use super::connections::{self, Gauge};
use super::offer::Offer;
use super::paths::SocketPaths;
use super::sockets::{SocketError, SocketFile, make_folder, remove_empty_folder};
use super::{dra, health, registration};
use nodedock_base::backoff::Backoff;
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_model::Problem;
use nodedock_model::limit::{BRIDGE_LOOK_PERIOD, BRIDGE_RETRY_MAX, BRIDGE_STREAMS_MAX, DRAIN};

/// A driver's sockets are not as they should be, by the driver's name.
pub(super) const NO_SOCKET: &str = "kubelet-socket";

/// A driver's sockets, and what answers on them.
pub(super) struct Standing {
    offer: Arc<Offer>,
    paths: SocketPaths,
    service: Option<Open>,
    registration: Option<Open>,
    failed: Option<Failed>,
    backoff: Backoff,
}

/// A socket that is answered on. Dropped, it is not any more; calls under way are.
struct Open {
    file: SocketFile,
    /// Of their own, so that at the daemon's end sockets are closed in order.
    tasks: Tasks,
}

struct Failed {
    why: String,
    again: Instant,
}

/// What is known of a driver's sockets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StandingView {
    pub(super) is_open: bool,
    pub(super) problem: Option<String>,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}

impl Standing {
    pub(super) fn new(offer: Offer, paths: SocketPaths) -> Self {
        let backoff = Backoff::new(BRIDGE_LOOK_PERIOD, BRIDGE_RETRY_MAX);
        let offer = Arc::new(offer);
        Self { offer, paths, service: None, registration: None, failed: None, backoff }
    }

    /// Opens what is not open, or not there any more.
    pub(super) async fn keep(&mut self) {
        if self.failed.as_ref().is_some_and(|failed| Instant::now() < failed.again) {
            return;
        }
        let driver = self.offer.driver.clone();
        let conditions = self.offer.ground.conditions.clone();
        match self.open().await {
            Ok(()) => {
                self.backoff.reset();
                if self.failed.take().is_some() {
                    conditions.clear(NO_SOCKET, driver.as_str());
                }
            }
            Err(error) => {
                let why = chain(&error);
                let message = format!("the kubelet cannot reach driver {driver}: {why}");
                conditions.set(driver.as_str(), Problem::unavailable(NO_SOCKET, message));
                self.failed = Some(Failed { why, again: Instant::now() + self.backoff.delay() });
            }
        }
    }

    async fn open(&mut self) -> Result<(), SocketError> {
        let offer = self.offer.clone();
        if !stands(self.service.as_ref()) {
            make_folder(&self.paths.folder)?;
            let (listener, file) = SocketFile::listen(&self.paths.service).await?;
            self.tell_opened(self.service.is_some(), "service");
            let tasks = Tasks::new();
            let gauges = [offer.connections.clone(), offer.ground.counters.connections.clone()];
            answer("kubelet-service", service(&offer, &tasks), listener, gauges, &tasks);
            self.service = Some(Open { file, tasks });
        }
        if !stands(self.registration.as_ref()) {
            let (listener, file) = SocketFile::listen(&self.paths.registration).await?;
            self.tell_opened(self.registration.is_some(), "registration");
            offer.offered_anew();
            let tasks = Tasks::new();
            let gauges = [Arc::default(), offer.ground.counters.connections.clone()];
            let server = builder().add_service(registration::service(offer));
            answer("kubelet-registration", server, listener, gauges, &tasks);
            self.registration = Some(Open { file, tasks });
        }
        Ok(())
    }

    fn tell_opened(&self, anew: bool, socket: &'static str) {
        let driver = &self.offer.driver;
        if anew {
            tracing::warn!(%driver, socket, "somebody removed a socket in the kubelet's folders, it is made anew");
        } else {
            tracing::info!(%driver, socket, "offered to the kubelet");
        }
    }

    /// Takes the driver from the kubelet. Calls under way go on; the tasks end with them.
    pub(super) fn close_registration(&mut self) -> Option<Tasks> {
        close(&mut self.registration)
    }

    /// The same for the socket on which the driver is called: the last to be closed.
    pub(super) fn close_service(&mut self) -> Option<Tasks> {
        close(&mut self.service)
    }

    /// Closes what is offered no more, and leaves nothing of it.
    pub(super) fn withdraw(mut self) -> Vec<Tasks> {
        let closed = [self.close_registration(), self.close_service()];
        remove_empty_folder(&self.paths.folder);
        self.offer.offered_anew();
        self.offer.ground.conditions.clear(NO_SOCKET, self.offer.driver.as_str());
        closed.into_iter().flatten().collect()
    }

    pub(super) fn offer(&self) -> &Arc<Offer> {
        &self.offer
    }

    pub(super) fn paths(&self) -> &SocketPaths {
        &self.paths
    }

    pub(super) fn view(&self) -> StandingView {
        StandingView {
            is_open: self.service.is_some() && self.registration.is_some(),
            problem: self.failed.as_ref().map(|failed| failed.why.clone()),
        }
    }
}

fn close(open: &mut Option<Open>) -> Option<Tasks> {
    let open = open.take()?;
    open.file.remove();
    open.tasks.stop();
    Some(open.tasks.clone())
}

fn stands(open: Option<&Open>) -> bool {
    open.is_some_and(|open| open.file.stands())
}

fn builder() -> Server {
    Server::builder().max_concurrent_streams(BRIDGE_STREAMS_MAX)
}

fn service(offer: &Arc<Offer>, tasks: &Tasks) -> Router {
    let dra = dra::Face(offer.clone());
    let health = health::Face { offer: offer.clone(), tasks: tasks.clone() };
    builder()
        .add_service(DraV1::new(dra.clone()))
        .add_service(DraV1beta1::new(dra))
        .add_service(HealthV1::new(health.clone()))
        .add_service(HealthV1alpha1::new(health))
}

/// Answers until the tasks stop, and what is under way then.
fn answer(
    name: &'static str,
    server: Router,
    listener: UnixListener,
    gauges: [Arc<Gauge>; 2],
    tasks: &Tasks,
) {
    let (incoming, stopped) = (connections::incoming(listener, gauges), tasks.stopped());
    tasks.spawn(name, async move {
        if let Err(error) = server.serve_with_incoming_shutdown(incoming, stopped).await {
            tracing::error!(error = chain(&error), "a kubelet is not answered any more");
        }
    });
}

/// Waits for what is under way on closed sockets.
pub(super) async fn drained(closed: Vec<Tasks>) {
    let all = futures::future::join_all(closed.iter().map(|tasks| tasks.drain(DRAIN_OF_SOCKETS))).await;
    if !all.into_iter().all(|ended| ended) {
        tracing::warn!("calls of the kubelet were still under way when their sockets were given up");
    }
}

/// A little less than what the whole daemon has.
const DRAIN_OF_SOCKETS: Duration = DRAIN.saturating_sub(Duration::from_secs(1));
