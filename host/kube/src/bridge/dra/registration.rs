//! `pluginregistration.Registration`: who a driver is, and whether the kubelet registered it.
//!
//! A kubelet gives a second for the first and five for the other: nothing here waits for anything.

use std::sync::Arc;

use nodedock_proto::kubelet::registration as wire;
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tonic::{Request, Response, Status};

use crate::bridge::dra::BRIDGE_HEALTH_STREAMS_MAX;
use crate::bridge::sockets::Connections;
use crate::bridge::{Context, SocketPaths, convert};
use nodedock_base::conditions::Conditions;
use nodedock_base::grpc::begin;
use nodedock_base::printable::one_line;
use nodedock_model::limit::PROBLEM_MESSAGE_BYTES_MAX;
use nodedock_model::{DriverName, Problem, ProblemCode};

/// State of a driver's registration with a kubelet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Registration {
    /// No kubelet asked yet.
    Offered,
    /// A kubelet asked who it is, and has not reported yet whether it is registered.
    Asked,
    Registered,
    /// The kubelet's message; it retries by itself.
    Refused(String),
}

/// An offered driver as it is now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverBridgeStatus {
    pub driver: DriverName,
    pub registration: Registration,
    /// Both of its sockets are open.
    pub is_open: bool,
    /// Open connections to the socket of its service: a kubelet keeps one.
    pub connections: u64,
    /// Why its sockets are not open, or cannot be created again.
    pub problem: Option<String>,
    pub sockets: SocketPaths,
}

/// A driver that is offered to the kubelet: what the services on its sockets share.
pub(in crate::bridge) struct OfferedDriver {
    pub(super) name: DriverName,
    pub(super) paths: SocketPaths,
    pub(super) context: Arc<Context>,
    pub(super) health_streams: Arc<Semaphore>,
    /// Connections to the socket of its service.
    pub(super) connections: Arc<Connections>,
    state: Mutex<DriverBridgeStatus>,
}

impl OfferedDriver {
    pub(in crate::bridge) fn new(name: DriverName, context: Arc<Context>) -> Self {
        let paths = context
            .directories
            .of_driver(&name, context.directories.start());
        let state = Mutex::new(DriverBridgeStatus {
            driver: name.clone(),
            registration: Registration::Offered,
            is_open: false,
            connections: 0,
            problem: None,
            sockets: paths.clone(),
        });
        let health_streams = Arc::new(Semaphore::new(BRIDGE_HEALTH_STREAMS_MAX));
        Self {
            name,
            paths,
            context,
            health_streams,
            connections: Arc::default(),
            state,
        }
    }

    pub(in crate::bridge) fn status(&self) -> DriverBridgeStatus {
        DriverBridgeStatus {
            connections: self.connections.open(),
            ..self.state.lock().clone()
        }
    }

    /// Why not both sockets could be opened, if so, and whether both are open, be it at paths that were removed.
    pub(super) fn set_open(&self, problem: Option<String>, is_open: bool) {
        let code = ProblemCode::KubeletSocket;
        let condition = problem.as_ref().map(|why| {
            let message = format!("the kubelet cannot reach driver {}: {why}", self.name);
            Problem::unavailable(code, message)
        });
        self.conditions()
            .update(code, self.name.as_str(), condition);
        let mut state = self.state.lock();
        (state.problem, state.is_open) = (problem, is_open);
    }

    /// Its registration socket is a new one, on which no kubelet has registered it, or one that outlived the process before.
    pub(super) fn set_registration(&self, registration: Registration) {
        self.state.lock().registration = registration;
        self.conditions()
            .clear(ProblemCode::KubeletRefusedDriver, self.name.as_str());
    }

    pub(super) fn conditions(&self) -> &Conditions {
        &self.context.parts.conditions
    }
}

#[tonic::async_trait]
impl wire::registration_server::Registration for OfferedDriver {
    /// A kubelet that repeats the call begins again; a refusal stays until it reports otherwise.
    async fn get_info(
        &self,
        request: Request<wire::InfoRequest>,
    ) -> Result<Response<wire::PluginInfo>, Status> {
        begin("Registration.GetInfo", &request);
        let mut state = self.state.lock();
        if !matches!(state.registration, Registration::Refused(_)) {
            state.registration = Registration::Asked;
        }
        drop(state);
        Ok(Response::new(convert::plugin_info(
            &self.name,
            &self.paths.service,
        )))
    }

    async fn notify_registration_status(
        &self,
        request: Request<wire::RegistrationStatus>,
    ) -> Result<Response<wire::RegistrationStatusResponse>, Status> {
        begin("Registration.NotifyRegistrationStatus", &request);
        let wire::RegistrationStatus {
            plugin_registered,
            error,
        } = request.into_inner();
        if plugin_registered {
            self.context.metrics.registered("registered");
            self.state.lock().registration = Registration::Registered;
            self.conditions()
                .clear(ProblemCode::KubeletRefusedDriver, self.name.as_str());
            tracing::info!(driver = %self.name, "registered with the kubelet");
            return Ok(Response::new(wire::RegistrationStatusResponse {}));
        }
        let why = one_line(&error, PROBLEM_MESSAGE_BYTES_MAX / 2);
        self.context.metrics.registered("refused");
        self.state.lock().registration = Registration::Refused(why.clone());
        let message = format!("the kubelet does not register driver {}: {why}", self.name);
        let problem = Problem::unavailable(ProblemCode::KubeletRefusedDriver, message);
        self.conditions().set(self.name.as_str(), problem);
        // As the Go helper does it.
        Err(Status::failed_precondition(format!(
            "driver {} was not registered: {why}",
            self.name
        )))
    }
}
