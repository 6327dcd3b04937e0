//! The calls of the DRA API, in the version of the plugin, with one internal form for all versions.

use std::sync::Arc;
use std::time::Duration;

use nodedock_proto::kubelet::dra::v1::dra_plugin_client::DraPluginClient as V1;
use nodedock_proto::kubelet::dra::v1beta1::dra_plugin_client::DraPluginClient as V1beta1;
use tonic::transport::Channel;
use tonic::{Request, Status};

use super::{DraService, convert};
use nodedock_model::ObjectRef;
use nodedock_model::limit::PLUGIN_ANSWER_BYTES_MAX;

/// A plugin's result for one claim, unchecked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ClaimAnswer {
    pub(super) devices: Vec<DeviceAnswer>,
    /// Empty: success.
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

/// Every entry of the response, by claim UID; a UID may occur twice.
pub(super) type Answers = Vec<(String, ClaimAnswer)>;

/// Metadata of a call.
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
    /// Passes the deadline in the call, so that the plugin can stop in time.
    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(self.deadline);
        // The request id comes from the node API, which accepts only plain characters.
        if let Ok(id) = self.request_id.parse() {
            request.metadata_mut().insert("x-request-id", id);
        }
        request
    }
}
