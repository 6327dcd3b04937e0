//! Which devices pods have, as the kubelet tells it (`v1.PodResourcesLister/List`).

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use nodedock_proto::kubelet::pod_resources::v1 as wire;
use tonic::Request;
use wire::pod_resources_lister_client::PodResourcesListerClient;

use super::claim::{self, Ids};
use super::dial::{DialError, dial};
use super::{HeldDevices, convert};
use nodedock_base::printable::one_line;
use nodedock_model::{ExtendedResource, ObjectName, limit};

const WORDS_BYTES_MAX: usize = 512;

/// The pod in which this daemon runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnPod {
    pub namespace: ObjectName,
    pub name: ObjectName,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum InUseError {
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error("list the devices of pods: {code:?}: {words}")]
    Refused { code: tonic::Code, words: String },
    #[error("list the devices of pods within {} s", .0.as_secs())]
    Deadline(Duration),
    #[error("the kubelet does not know of its pods yet: it names {0}")]
    Incomplete(&'static str),
}

/// Devices that pods have, by resource.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct InUse(pub(super) BTreeMap<ExtendedResource, Ids>);

impl InUse {
    /// The resource under whose name pods have devices of a claim. A claim's name says which resource it is of.
    pub(super) fn resource(&self, held: &HeldDevices) -> Option<&ExtendedResource> {
        let has = |(resource, ids): &(&ExtendedResource, &Ids)| {
            !ids.is_disjoint(&held.devices)
                && claim::id(&held.driver, resource, &held.devices).is_ok_and(|id| id.uid == held.claim.uid)
        };
        self.0.iter().find(has).map(|(resource, _)| resource)
    }
}

/// Whoever knows which devices pods have.
#[async_trait]
pub(super) trait InUseSource: Send + Sync {
    async fn list(&self, deadline: Duration) -> Result<InUse, InUseError>;
}

/// Asks the kubelet.
#[derive(Debug, Clone)]
pub(super) struct Lister {
    pub(super) socket: PathBuf,
    pub(super) own_pod: Option<OwnPod>,
}

#[async_trait]
impl InUseSource for Lister {
    /// A kubelet that has just started names fewer pods than it has, until it heard of all of them: one that names no pod, or not
    /// ours, is not believed.
    async fn list(&self, deadline: Duration) -> Result<InUse, InUseError> {
        let listed = tokio::time::timeout(deadline, self.ask(deadline)).await;
        let told = convert::told(listed.map_err(|_| InUseError::Deadline(deadline))??);
        if told.pods.is_empty() {
            return Err(InUseError::Incomplete("no pod"));
        }
        let is_missing = |own: &OwnPod| {
            !told.pods.contains(&(own.namespace.as_str().to_owned(), own.name.as_str().to_owned()))
        };
        if self.own_pod.as_ref().is_some_and(is_missing) {
            return Err(InUseError::Incomplete("others, and not that of this daemon"));
        }
        Ok(InUse(told.devices))
    }
}

impl Lister {
    async fn ask(&self, deadline: Duration) -> Result<wire::ListPodResourcesResponse, InUseError> {
        let channel = dial(&self.socket).await?;
        let client = PodResourcesListerClient::new(channel);
        let mut client = client.max_decoding_message_size(limit::POD_RESOURCES_MESSAGE_BYTES_MAX);
        let mut request = Request::new(wire::ListPodResourcesRequest {});
        request.set_timeout(deadline);
        let refused = |status: tonic::Status| InUseError::Refused {
            code: status.code(),
            words: one_line(status.message(), WORDS_BYTES_MAX),
        };
        client.list(request).await.map(tonic::Response::into_inner).map_err(refused)
    }
}
