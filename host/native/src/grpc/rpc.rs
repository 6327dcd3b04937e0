//! Calls of services whose versions have the same messages: the version is only a part of the path.

use std::time::Duration;

use nodedock_proto::prost::Message;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;

use nodedock_core::driver::Call;
use nodedock_model::limit::PLUGIN_ANSWER_BYTES_MAX;

/// Passes the deadline in the call, so that the plugin can stop in time.
pub(super) fn timed<T>(deadline: Duration, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(deadline);
    request
}

pub(super) fn named<T>(request_id: &str, mut request: Request<T>) -> Request<T> {
    // The request id comes from the node API, which accepts only plain characters.
    if let Ok(id) = request_id.parse() {
        request.metadata_mut().insert("x-request-id", id);
    }
    request
}

pub(super) fn request<T>(call: &Call, message: T) -> Request<T> {
    named(&call.request_id, timed(call.deadline, message))
}

pub(super) async fn unary<Q, A>(
    channel: Channel,
    path: String,
    request: Request<Q>,
) -> Result<A, Status>
where
    Q: Message + 'static,
    A: Message + Default + 'static,
{
    let answer = ready(channel)
        .await?
        .unary(request, plain(path), ProstCodec::default())
        .await;
    answer.map(Response::into_inner)
}

/// Opens a stream of a plugin's messages.
pub(super) async fn stream<Q, A>(
    channel: Channel,
    path: String,
    request: Request<Q>,
    answer_bytes_max: usize,
) -> Result<Streaming<A>, Status>
where
    Q: Message + 'static,
    A: Message + Default + 'static,
{
    let client = ready(channel).await?;
    let mut client = client.max_decoding_message_size(answer_bytes_max);
    let answer = client
        .server_streaming(request, plain(path), ProstCodec::default())
        .await;
    answer.map(Response::into_inner)
}

fn plain(path: String) -> PathAndQuery {
    PathAndQuery::from_maybe_shared(path).expect("names of services and methods are plain")
}

async fn ready(channel: Channel) -> Result<Grpc<Channel>, Status> {
    let mut client = Grpc::new(channel).max_decoding_message_size(PLUGIN_ANSWER_BYTES_MAX);
    let ready = client.ready().await;
    ready.map_err(|error| Status::unknown(format!("the connection is not ready: {error}")))?;
    Ok(client)
}
