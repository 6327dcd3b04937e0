//! The calls of the DRA API, in the version that a plugin serves. One form inside, whatever the version.

use std::sync::Arc;
use std::time::Duration;

use nodedock_proto::kubelet::dra::v1::dra_plugin_client::DraPluginClient as V1;
use nodedock_proto::kubelet::dra::v1beta1::dra_plugin_client::DraPluginClient as V1beta1;
use tonic::transport::Channel;
use tonic::{Request, Status};

use super::{DraService, convert};
use nodedock_model::ObjectRef;
use nodedock_model::limit::PLUGIN_ANSWER_BYTES_MAX;

/// What a plugin answered for one claim, unchecked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ClaimAnswer {
    pub(super) devices: Vec<DeviceAnswer>,
    /// Empty: it went well.
    pub(super) error: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct DeviceAnswer {
    pub(super) requests: Vec<String>,
    pub(super) pool: String,
    pub(super) device: String,
    pub(super) cdi_names: Vec<String>,
    pub(super) share_id: Option<String>,
}

/// Every entry of the answer, by claim UID; one UID may occur twice.
pub(super) type Answers = Vec<(String, ClaimAnswer)>;

/// What goes with a call beside its claims.
pub(super) struct Envelope {
    pub(super) request_id: Arc<str>,
    pub(super) deadline: Duration,
}

pub(super) async fn prepare(
    channel: Channel,
    service: DraService,
    envelope: &Envelope,
    claims: &[&ObjectRef],
) -> Result<Answers, Status> {
    match service {
        DraService::V1 => {
            let request = envelope.request(convert::v1::prepare_request(claims));
            let mut client = V1::new(channel).max_decoding_message_size(PLUGIN_ANSWER_BYTES_MAX);
            client.node_prepare_resources(request).await.map(|a| convert::v1::prepared(a.into_inner()))
        }
        DraService::V1beta1 => {
            let request = envelope.request(convert::v1beta1::prepare_request(claims));
            let mut client = V1beta1::new(channel).max_decoding_message_size(PLUGIN_ANSWER_BYTES_MAX);
            client.node_prepare_resources(request).await.map(|a| convert::v1beta1::prepared(a.into_inner()))
        }
    }
}

pub(super) async fn unprepare(
    channel: Channel,
    service: DraService,
    envelope: &Envelope,
    claims: &[&ObjectRef],
) -> Result<Answers, Status> {
    match service {
        DraService::V1 => {
            let request = envelope.request(convert::v1::unprepare_request(claims));
            let mut client = V1::new(channel).max_decoding_message_size(PLUGIN_ANSWER_BYTES_MAX);
            client.node_unprepare_resources(request).await.map(|a| convert::v1::unprepared(a.into_inner()))
        }
        DraService::V1beta1 => {
            let request = envelope.request(convert::v1beta1::unprepare_request(claims));
            let mut client = V1beta1::new(channel).max_decoding_message_size(PLUGIN_ANSWER_BYTES_MAX);
            client
                .node_unprepare_resources(request)
                .await
                .map(|a| convert::v1beta1::unprepared(a.into_inner()))
        }
    }
}

impl Envelope {
    /// The deadline goes with the call, so that the plugin can give up in time.
    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(self.deadline);
        // A request's id comes from the node API, which lets plain characters in only.
        if let Ok(id) = self.request_id.parse() {
            request.metadata_mut().insert("x-request-id", id);
        }
        request
    }
}
