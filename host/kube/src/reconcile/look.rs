//! What the API server says of claims and pods, as the decision needs it. Only what it plainly says: whatever else comes is `Unknown`.

use std::sync::Arc;

use serde::Deserialize;

use super::decide::{NodePod, OtherPod, Sight};
use crate::exchange::{Away, Exchange, Refusal, Request, Subject};
use crate::{claim_path, claim_subject};
use nodedock_base::error::chain;
use nodedock_model::{Consumer, ObjectName, ObjectRef, Uid, limit};

/// Asks about this node.
pub(super) struct Look {
    pub(super) api: Arc<dyn Exchange>,
    pub(super) node: ObjectName,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Metadata {
    name: String,
    namespace: String,
    uid: String,
    resource_version: String,
    #[serde(rename = "continue")]
    next: String,
}

#[derive(Deserialize)]
struct PodList {
    metadata: Metadata,
    items: Option<Vec<Pod>>,
}

#[derive(Deserialize)]
struct Pod {
    metadata: Metadata,
    #[serde(default)]
    spec: PodSpec,
    #[serde(default)]
    status: PodStatus,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct PodSpec {
    node_name: String,
    resource_claims: Option<Vec<ClaimName>>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct PodStatus {
    phase: String,
    resource_claim_statuses: Option<Vec<ClaimName>>,
    extended_resource_claim_status: Option<ClaimName>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct ClaimName {
    resource_claim_name: Option<String>,
}

#[derive(Deserialize)]
struct Claim {
    metadata: Metadata,
    #[serde(default)]
    status: ClaimStatus,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct ClaimStatus {
    reserved_for: Option<Vec<Reserved>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Reserved {
    #[serde(default)]
    api_group: String,
    resource: String,
    name: ObjectName,
    uid: Uid,
}

impl PodStatus {
    fn is_finished(&self) -> bool {
        matches!(self.phase.as_str(), "Succeeded" | "Failed")
    }
}

impl Look {
    /// Every pod that is bound to this node.
    pub(super) async fn pods(&self) -> Result<Vec<NodePod>, Refusal> {
        let of = Subject { group: "", resource: "pods", kind: "PodList", name: "" };
        let mut pods = Vec::new();
        let mut next = String::new();
        loop {
            let path = format!(
                "/api/v1/pods?fieldSelector=spec.nodeName%3D{}&limit={}{next}",
                self.node,
                limit::NODE_PODS_PAGE
            );
            let body = self.api.exchange(Request::get(path)).await?.object(of)?;
            let list: PodList = parsed(&body)?;
            if list.metadata.resource_version.is_empty() {
                return Err(Away::new("the answer is no list of pods: it has no resource version").into());
            }
            for pod in list.items.unwrap_or_default() {
                if pod.spec.node_name != self.node.as_str() {
                    return Err(Away::new("the answer lists pods of other nodes").into());
                }
                pods.push(node_pod(pod)?);
            }
            if list.metadata.next.is_empty() {
                return Ok(pods);
            }
            if pods.len() >= limit::NODE_PODS_MAX {
                let words = format!("the node has more than {} pods", limit::NODE_PODS_MAX);
                return Err(Away::new(words).into());
            }
            next = format!("&continue={}", encoded(&list.metadata.next));
        }
    }

    pub(super) async fn claim(&self, claim: &ObjectRef) -> Sight {
        match self.read_claim(claim).await {
            Ok(sight) => sight,
            Err(Refusal::Missing) => Sight::Gone,
            Err(error) => {
                tracing::debug!(%claim, error = chain(&error), "whether a held claim is still there is not known");
                Sight::Unknown
            }
        }
    }

    async fn read_claim(&self, claim: &ObjectRef) -> Result<Sight, Refusal> {
        let path = claim_path(&self.api.resource_api(), claim);
        let body = self.api.exchange(Request::get(path)).await?.object(claim_subject(claim))?;
        let read: Claim = parsed(&body)?;
        let metadata = &read.metadata;
        let same_name =
            metadata.name == claim.name.as_str() && metadata.namespace == claim.namespace.as_str();
        if !same_name || metadata.uid.is_empty() {
            return Err(Away::new("the answer is about another claim").into());
        }
        let reserved = read.status.reserved_for.unwrap_or_default().into_iter();
        let reserved_for = reserved
            .map(|r| Consumer { api_group: r.api_group, resource: r.resource, name: r.name, uid: r.uid })
            .collect();
        match metadata.uid == claim.uid.as_str() {
            true => Ok(Sight::Here { reserved_for }),
            false => Ok(Sight::Replaced { reserved_for }),
        }
    }

    /// A pod that is not among those of this node.
    pub(super) async fn other_pod(&self, namespace: &ObjectName, pod: &Consumer) -> OtherPod {
        let of = Subject { group: "", resource: "pods", kind: "Pod", name: pod.name.as_str() };
        let path = format!("/api/v1/namespaces/{namespace}/pods/{}", pod.name);
        let read = match self.api.exchange(Request::get(path)).await {
            Ok(answer) => answer.object(of).and_then(|body| parsed::<Pod>(&body)),
            Err(away) => Err(away.into()),
        };
        match read {
            Err(Refusal::Missing) => OtherPod::Gone,
            Err(_) => OtherPod::Possible,
            Ok(read) if read.metadata.name != pod.name.as_str() || read.metadata.uid.is_empty() => {
                OtherPod::Possible
            }
            Ok(read) if read.metadata.uid != pod.uid.as_str() => OtherPod::Gone,
            Ok(read) if read.status.is_finished() => OtherPod::Elsewhere,
            // Not bound yet, or bound since the list was made.
            Ok(read) if read.spec.node_name.is_empty() || read.spec.node_name == self.node.as_str() => {
                OtherPod::Possible
            }
            Ok(_) => OtherPod::Elsewhere,
        }
    }
}

fn node_pod(pod: Pod) -> Result<NodePod, Refusal> {
    let wrong =
        |error: nodedock_model::NameError| Refusal::from(Away::new(format!("a pod of the list: {error}")));
    let named = pod.spec.resource_claims.into_iter().flatten();
    let made = pod.status.resource_claim_statuses.iter().flatten();
    let extended = pod.status.extended_resource_claim_status.iter();
    let names = named
        .filter_map(|claim| claim.resource_claim_name)
        .chain(made.chain(extended).filter_map(|claim| claim.resource_claim_name.clone()));
    let claims = names.filter(|name| !name.is_empty()).map(ObjectName::new).collect::<Result<_, _>>();
    Ok(NodePod {
        namespace: ObjectName::new(&pod.metadata.namespace).map_err(wrong)?,
        uid: Uid::new(&pod.metadata.uid).map_err(wrong)?,
        finished: pod.status.is_finished(),
        claims: claims.map_err(wrong)?,
    })
}

fn parsed<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Refusal> {
    serde_json::from_slice(body)
        .map_err(|error| Away::new(format!("the answer is not as an API server's: {error}")).into())
}

/// For a query.
fn encoded(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'~');
    let byte = |b: u8| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") };
    text.bytes().map(byte).collect()
}
