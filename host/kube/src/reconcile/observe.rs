//! Observations for the decision: this node's pods from the kubelet, claims and pods from the API server. Only explicit answers count:
//! everything else is `Unknown`.
//!
//! The pods are those of the kubelet, if it lists them, and otherwise those of the API server. Only the API server knows pods that are not
//! of this node. An account that may not read them is treated as an unreachable API server.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaimConsumerReference;
use kube::api::{Api, DynamicObject, ListParams};
use parking_lot::Mutex;

use super::decide::{ClaimState, NODE_PODS_MAX, NodePod, is_finished};
use super::kubelet_pods::{KubeletPods, KubeletPodsError};
use crate::client::{ApiError, DraResource, ErrorKind, KubeClient};
use nodedock_model::{Consumer, NameError, ObjectName, ObjectRef, Uid};

/// Pods in one answer: a node has at most 110 by default.
const PODS_PAGE: u32 = 250;

/// Source of the last list of this node's pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PodSource {
    Kubelet,
    ApiServer,
}

/// Reads pods of this node and claims.
pub(crate) struct Observer {
    client: KubeClient,
    node: ObjectName,
    kubelet: KubeletPods,
    source: Mutex<Option<PodSource>>,
    /// It was logged that the account may not read pods.
    is_forbidden: AtomicBool,
}

impl Observer {
    pub(super) fn new(client: KubeClient, node: ObjectName, kubelet_root: &Path) -> Self {
        let kubelet = KubeletPods::new(kubelet_root);
        Self {
            client,
            node,
            kubelet,
            source: Mutex::default(),
            is_forbidden: AtomicBool::default(),
        }
    }

    /// Every pod that is bound to this node. Fails if neither the kubelet nor the API server lists them.
    pub(super) async fn pods(&self) -> Result<Vec<NodePod>, String> {
        let why = match self.kubelet.list(&self.node).await {
            Ok(pods) => {
                self.set_source(PodSource::Kubelet, None);
                return Ok(pods);
            }
            Err(why) => why,
        };
        self.set_source(PodSource::ApiServer, Some(&why));
        self.pods_of_api_server().await.map_err(|error| match why {
            KubeletPodsError::NotServed(_) => error.to_string(),
            why => format!("{error}; {why}"),
        })
    }

    /// `why`: why it is not the kubelet.
    fn set_source(&self, source: PodSource, why: Option<&KubeletPodsError>) {
        let before = self.source.lock().replace(source);
        match why {
            _ if before == Some(source) => {}
            None => tracing::info!("the kubelet lists the pods of this node"),
            // Most kubelets have none.
            Some(why @ KubeletPodsError::NotServed(_)) if before.is_none() => {
                tracing::debug!(%why, "the API server lists the pods of this node");
            }
            Some(why) => {
                tracing::warn!(%why, "the API server lists the pods of this node, the kubelet does not")
            }
        }
    }

    async fn pods_of_api_server(&self) -> Result<Vec<NodePod>, ApiError> {
        let api: Api<Pod> = Api::all(self.client.client());
        let mut parameters = ListParams::default().limit(PODS_PAGE);
        parameters.field_selector = Some(format!("spec.nodeName={}", self.node));
        let mut pods = Vec::new();
        loop {
            let page = api.list(&parameters).await?;
            if page
                .metadata
                .resource_version
                .is_none_or(|version| version.is_empty())
            {
                return Err(odd(
                    "the answer is no list of pods: it has no resource version",
                ));
            }
            for pod in page.items {
                pods.push(self.pod(pod)?);
            }
            parameters.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
            if parameters.continue_token.is_none() {
                return Ok(pods);
            }
            if pods.len() >= NODE_PODS_MAX {
                return Err(odd(&format!(
                    "the node has more than {} pods",
                    NODE_PODS_MAX
                )));
            }
        }
    }

    fn pod(&self, pod: Pod) -> Result<NodePod, ApiError> {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
        if node != Some(self.node.as_str()) {
            return Err(odd("the answer lists pods of other nodes"));
        }
        pod_of(pod).map_err(|error| odd(&format!("a pod of the list: {error}")))
    }

    pub(super) async fn claim(&self, claim: &ObjectRef) -> ClaimState {
        let got = self.client.versioned(|version| {
            let resource = version.resource(DraResource::Claims);
            let api: Api<DynamicObject> =
                Api::namespaced_with(self.client.client(), claim.namespace.as_str(), &resource);
            async move { Ok(api.get(claim.name.as_str()).await?) }
        });
        match got.await.and_then(|object| state_of(claim, object)) {
            Ok(state) => state,
            Err(error) if error.is_missing(claim.name.as_str()) => ClaimState::Gone,
            Err(error) => {
                tracing::debug!(%claim, %error, "it is not known whether a held claim still exists");
                ClaimState::Unknown
            }
        }
    }

    /// Returns whether a pod that is not among those of this node may be bound to it; true if that is not known.
    pub(super) async fn may_be_here(&self, namespace: &ObjectName, pod: &Consumer) -> bool {
        match place_of(&self.client, &self.node, namespace, pod).await {
            Ok(place) => place != Place::Elsewhere,
            Err(error) => {
                let is_forbidden = error.kind == ErrorKind::Forbidden;
                if is_forbidden && !self.is_forbidden.swap(true, Ordering::Relaxed) {
                    tracing::warn!(%error, "it is not known whether pods are bound to this node, claims that are reserved for them are kept");
                }
                true
            }
        }
    }
}

/// Returns where a pod is now.
pub(crate) async fn place_of(
    client: &KubeClient,
    node: &ObjectName,
    namespace: &ObjectName,
    pod: &Consumer,
) -> Result<Place, ApiError> {
    let api: Api<Pod> = Api::namespaced(client.client(), namespace.as_str());
    let read = match api.get(pod.name.as_str()).await.map_err(ApiError::from) {
        Ok(read) => read,
        Err(error) if error.is_missing(pod.name.as_str()) => return Ok(Place::Elsewhere),
        Err(error) => return Err(error),
    };
    let uid = read.metadata.uid.as_deref().unwrap_or_default();
    if read.metadata.name.as_deref() != Some(pod.name.as_str()) || uid.is_empty() {
        return Ok(Place::Unknown);
    }
    let phase = read
        .status
        .and_then(|status| status.phase)
        .unwrap_or_default();
    if uid != pod.uid.as_str() || is_finished(&phase) {
        return Ok(Place::Elsewhere);
    }
    Ok(
        match read
            .spec
            .and_then(|spec| spec.node_name)
            .unwrap_or_default()
        {
            bound if bound.is_empty() => Place::Unbound,
            bound if bound == node.as_str() => Place::Here,
            _ => Place::Elsewhere,
        },
    )
}

/// Place of a pod, relative to this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// The API server does not plainly say it.
    Unknown,
    Unbound,
    Here,
    /// Bound to another node, finished, or gone.
    Elsewhere,
}

/// A pod with the claims that it names.
pub(crate) fn pod_of(pod: Pod) -> Result<NodePod, NameError> {
    let (spec, status) = (pod.spec.unwrap_or_default(), pod.status.unwrap_or_default());
    let finished = is_finished(status.phase.as_deref().unwrap_or_default());
    let named = spec
        .resource_claims
        .into_iter()
        .flatten()
        .filter_map(|claim| claim.resource_claim_name);
    let made = status.resource_claim_statuses.into_iter().flatten();
    let made = made.filter_map(|claim| claim.resource_claim_name);
    let extended = status
        .extended_resource_claim_status
        .map(|claim| claim.resource_claim_name);
    let group = spec.scheduling_group.and_then(|group| group.pod_group_name);
    let names = named
        .chain(made)
        .chain(extended)
        .filter(|name| !name.is_empty());
    Ok(NodePod {
        namespace: ObjectName::new(pod.metadata.namespace.unwrap_or_default())?,
        uid: Uid::new(pod.metadata.uid.unwrap_or_default())?,
        group: group.map(ObjectName::new).transpose()?,
        finished,
        claims: names.map(ObjectName::new).collect::<Result<_, _>>()?,
    })
}

fn state_of(claim: &ObjectRef, object: DynamicObject) -> Result<ClaimState, ApiError> {
    let metadata = &object.metadata;
    let uid = metadata.uid.as_deref().unwrap_or_default();
    let is_claim = object
        .types
        .as_ref()
        .is_some_and(|types| types.kind == "ResourceClaim");
    let is_named = metadata.name.as_deref() == Some(claim.name.as_str())
        && metadata.namespace.as_deref() == Some(claim.namespace.as_str());
    if !is_claim || !is_named || uid.is_empty() {
        return Err(odd("the answer is about another object"));
    }
    let reserved_for = consumers_of(&object)?;
    match uid == claim.uid.as_str() {
        true => Ok(ClaimState::Present { reserved_for }),
        false => Ok(ClaimState::Replaced { reserved_for }),
    }
}

/// The consumers that a claim is reserved for.
pub(crate) fn consumers_of(claim: &DynamicObject) -> Result<Vec<Consumer>, ApiError> {
    let reserved_for = claim.data.pointer("/status/reservedFor").cloned();
    let reserved_for: Option<Vec<ResourceClaimConsumerReference>> =
        serde_json::from_value(reserved_for.unwrap_or_default())
            .map_err(|error| odd(&error.to_string()))?;
    let consumers = reserved_for.into_iter().flatten().map(|consumer| {
        Ok(Consumer {
            api_group: consumer.api_group.unwrap_or_default(),
            resource: consumer.resource,
            name: ObjectName::new(consumer.name)?,
            uid: Uid::new(consumer.uid)?,
        })
    });
    consumers
        .collect::<Result<_, NameError>>()
        .map_err(|error| odd(&error.to_string()))
}

fn odd(what: &str) -> ApiError {
    ApiError::new(ErrorKind::NotKubernetes, what)
}
