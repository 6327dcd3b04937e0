//! The node API for users other than root: three of its methods, for the claims of each client's user alone.

use std::future::Ready;
use std::task::{Context, Poll};

use futures::future::Either;
use nodedock_proto::node::v1::node_server::NodeServer;
use nodedock_proto::unix;
use tokio::net::UnixListener;
use tokio_stream::StreamExt;
use tonic::transport::server::Connected;
use tonic::{Request, Status};

use super::{NodeApi, caller};
use crate::user_connections::UserConnections;
use nodedock_base::error::chain;
use nodedock_core::manager::claims::PodSelector;
use nodedock_kube::local::user_namespace;
use nodedock_model::{Claim, ObjectName, PodRequest, limit};

/// Methods for users other than root.
const USER_METHODS: [&str; 3] = ["PreparePod", "UnpreparePod", "ListClaims"];

/// Calls of a user's connection at the same time: more wait.
const USER_CALLS_MAX: usize = 8;

/// Serves these methods until the tasks stop, for the claims of each client's user.
pub async fn serve_users(api: NodeApi, listener: UnixListener, connections: UserConnections) {
    let stopped = api.tasks.stopped();
    let api = NodeApi {
        is_for_users: true,
        ..api
    };
    let service = NodeServer::new(api)
        .max_decoding_message_size(limit::NODE_API_MESSAGE_BYTES_MAX)
        .max_encoding_message_size(limit::NODE_API_MESSAGE_BYTES_MAX);
    let server = tonic::transport::Server::builder()
        .layer(tower::layer::layer_fn(UserMethods))
        .concurrency_limit_per_connection(USER_CALLS_MAX)
        .add_service(service);
    let incoming = unix::incoming(listener).filter_map(move |accepted| match accepted {
        Ok(stream) => {
            let user = stream.connect_info().peer_cred?.uid();
            Some(Ok(stream.guarded_by(connections.enter(user)?)))
        }
        Err(error) => Some(Err(error)),
    });
    if let Err(error) = server.serve_with_incoming_shutdown(incoming, stopped).await {
        tracing::error!(error = chain(&error), "the node api for users ended");
    }
}

/// Refuses all but [`USER_METHODS`].
#[derive(Clone)]
struct UserMethods<S>(S);

impl<S, B> tower::Service<http::Request<B>> for UserMethods<S>
where
    S: tower::Service<http::Request<B>, Response = http::Response<tonic::body::Body>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Either<S::Future, Ready<Result<S::Response, S::Error>>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let method = request.uri().path().rsplit('/').next().unwrap_or_default();
        if USER_METHODS.contains(&method) {
            return Either::Left(self.0.call(request));
        }
        let why = format!(
            "{method:?} is for root alone; users have {}",
            USER_METHODS.join(", ")
        );
        let refused = Status::permission_denied(why).into_http();
        Either::Right(std::future::ready(Ok(refused)))
    }
}

impl NodeApi {
    /// Returns the namespace that a client is confined to. `None`: it may use all.
    pub(super) fn confined<T>(&self, request: &Request<T>) -> Result<Option<String>, Status> {
        if !self.is_for_users {
            return Ok(None);
        }
        let unknown = || Status::permission_denied("the user of the client is not known");
        let uid = caller(request).uid.ok_or_else(unknown)?;
        Ok(Some(user_namespace(uid)))
    }

    /// Refuses a pod that is not of the namespace, or that has more than claims of it.
    pub(super) fn check_own(
        namespace: &str,
        pod: &PodRequest,
        inline: &[Claim],
    ) -> Result<(), Status> {
        let is_own = pod.pod.namespace.as_str() == namespace;
        let has_more = !inline.is_empty()
            || pod
                .containers
                .iter()
                .any(|container| !container.resources.is_empty());
        if !is_own || has_more {
            let why = format!(
                "users have pods and claims of their namespace {namespace} alone, and no manifests or extended resources"
            );
            return Err(Status::permission_denied(why));
        }
        Ok(())
    }
}

/// Confines the pods of a selector to a namespace.
pub(super) fn own_pods(own: &str, selector: PodSelector) -> Result<PodSelector, Status> {
    match selector {
        PodSelector::Uid(uid) => {
            let malformed = |error| Status::internal(format!("{own} is no namespace: {error}"));
            let namespace = ObjectName::new(own).map_err(malformed)?;
            Ok(PodSelector::UidIn(namespace, uid))
        }
        PodSelector::Name(namespace, _) | PodSelector::UidIn(namespace, _)
            if namespace.as_str() != own =>
        {
            let why = format!("the pod is not of the namespace {own}");
            Err(Status::permission_denied(why))
        }
        selector => Ok(selector),
    }
}
