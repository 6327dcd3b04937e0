//! The pods of this node as the kubelet lists them itself (its Pods API), so that the API server need not.
//!
//! A list counts only if it is complete: a kubelet that has just started knows static pods alone, until it has read the others from the API
//! server. From then on it has at least one pod of that source.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nodedock_proto::kubelet::pods::v1alpha1 as wire;
use nodedock_proto::prost::Message;
use tonic::{Code, Request};
use wire::pods_client::PodsClient;

use super::decide::{NODE_PODS_MAX, NodePod, is_finished};
use nodedock_base::error::chain;
use nodedock_base::printable::one_line;
use nodedock_base::socket::{ConnectError, connect};
use nodedock_model::{NameError, ObjectName, Uid};

/// The socket below the kubelet's root directory (Kubernetes 1.36: `pkg/kubelet/kubelet_getters.go`, `pkg/kubelet/apis/pods`).
const SOCKET: &str = "pods-api/pods-api.sock";

/// Bytes of a list: some hundred pods with long specs. A pod has at most 1.5 MiB.
const LIST_BYTES_MAX: usize = 64 << 20;

const LIST_DEADLINE: Duration = Duration::from_secs(10);

const MESSAGE_BYTES_MAX: usize = 512;

/// The annotation by which a kubelet says where it read a pod, and the value for the API server.
const SOURCE: &str = "kubernetes.io/config.source";
const SOURCE_API: &str = "api";

/// The kubelet's Pods API.
pub(super) struct KubeletPods {
    socket: PathBuf,
}

/// Why the kubelet's pods are not known from itself.
#[derive(Debug, thiserror::Error)]
pub(super) enum KubeletPodsError {
    #[error("the kubelet has no Pods API: {0}")]
    NotServed(String),
    #[error("{0}")]
    Unreachable(String),
    #[error("list pods: {code:?}: {message}")]
    Refused { code: Code, message: String },
    #[error("the kubelet's list of pods: {0}")]
    Malformed(String),
    #[error("the kubelet's list of pods is not complete yet: it has no pod of the API server")]
    Incomplete,
}

impl KubeletPods {
    pub(super) fn new(kubelet_root: &Path) -> Self {
        Self {
            socket: kubelet_root.join(SOCKET),
        }
    }

    /// Every pod of the kubelet, which is that of `node`.
    pub(super) async fn list(&self, node: &ObjectName) -> Result<Vec<NodePod>, KubeletPodsError> {
        let listed = tokio::time::timeout(LIST_DEADLINE, self.call()).await;
        node_pods(
            &listed
                .map_err(|_| {
                    KubeletPodsError::Unreachable(format!(
                        "no list of pods within {} s",
                        LIST_DEADLINE.as_secs()
                    ))
                })??
                .pods,
            node,
        )
    }

    async fn call(&self) -> Result<wire::ListPodsResponse, KubeletPodsError> {
        let channel = connect(&self.socket)
            .await
            .map_err(|error| of_connection(&error))?;
        let mut client = PodsClient::new(channel).max_decoding_message_size(LIST_BYTES_MAX);
        let mut request = Request::new(wire::ListPodsRequest {});
        request.set_timeout(LIST_DEADLINE);
        let listed = client.list_pods(request).await.map_err(|status| {
            let message = one_line(status.message(), MESSAGE_BYTES_MAX);
            match status.code() {
                Code::Unimplemented => KubeletPodsError::NotServed(message),
                code => KubeletPodsError::Refused { code, message },
            }
        });
        Ok(listed?.into_inner())
    }
}

fn of_connection(error: &ConnectError) -> KubeletPodsError {
    match error {
        ConnectError::Connect { source, .. } if source.kind() == io::ErrorKind::NotFound => {
            KubeletPodsError::NotServed(chain(error))
        }
        _ => KubeletPodsError::Unreachable(chain(error)),
    }
}

fn node_pods(
    encoded: &[impl AsRef<[u8]>],
    node: &ObjectName,
) -> Result<Vec<NodePod>, KubeletPodsError> {
    if encoded.len() > NODE_PODS_MAX {
        return Err(malformed(format!("it has more than {NODE_PODS_MAX} pods")));
    }
    let pods = encoded.iter().map(|pod| wire::Pod::decode(pod.as_ref()));
    let pods: Vec<_> = pods
        .collect::<Result<_, _>>()
        .map_err(|error| malformed(error.to_string()))?;
    if !pods.iter().any(is_of_api_server) {
        return Err(KubeletPodsError::Incomplete);
    }
    pods.into_iter().map(|pod| node_pod(pod, node)).collect()
}

fn is_of_api_server(pod: &wire::Pod) -> bool {
    let annotations: Option<&BTreeMap<_, _>> =
        pod.metadata.as_ref().map(|metadata| &metadata.annotations);
    annotations
        .and_then(|all| all.get(SOURCE))
        .is_some_and(|source| source == SOURCE_API)
}

fn node_pod(pod: wire::Pod, node: &ObjectName) -> Result<NodePod, KubeletPodsError> {
    let wire::Pod {
        metadata,
        spec,
        status,
    } = pod;
    let (metadata, spec, status) = (
        metadata.unwrap_or_default(),
        spec.unwrap_or_default(),
        status.unwrap_or_default(),
    );
    let shown = one_line(
        &format!("{}/{}", metadata.namespace, metadata.name),
        MESSAGE_BYTES_MAX,
    );
    let bad_name = |field: &'static str| {
        let shown = shown.clone();
        move |error: NameError| malformed(format!("{field} of pod {shown}: {error}"))
    };
    if spec.node_name != node.as_str() {
        return Err(malformed(format!("pod {shown} is not of this node")));
    }
    let named = spec
        .resource_claims
        .into_iter()
        .map(|claim| claim.resource_claim_name);
    let made = status
        .resource_claim_statuses
        .into_iter()
        .map(|claim| claim.resource_claim_name);
    let extended = status
        .extended_resource_claim_status
        .map(|claim| claim.resource_claim_name);
    let names = named
        .chain(made)
        .chain(extended)
        .filter(|name| !name.is_empty());
    let group = spec
        .scheduling_group
        .map(|group| group.pod_group_name)
        .filter(|name| !name.is_empty());
    Ok(NodePod {
        namespace: ObjectName::new(metadata.namespace).map_err(bad_name("metadata.namespace"))?,
        uid: Uid::new(metadata.uid).map_err(bad_name("metadata.uid"))?,
        group: group
            .map(ObjectName::new)
            .transpose()
            .map_err(bad_name("spec.schedulingGroup"))?,
        finished: is_finished(&status.phase),
        claims: names
            .map(ObjectName::new)
            .collect::<Result<_, _>>()
            .map_err(bad_name("a claim"))?,
    })
}

fn malformed(what: String) -> KubeletPodsError {
    KubeletPodsError::Malformed(one_line(&what, MESSAGE_BYTES_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn node() -> ObjectName {
        ObjectName::new("node-1").unwrap()
    }

    fn pod() -> wire::Pod {
        wire::Pod {
            metadata: Some(wire::ObjectMeta {
                name: "a".to_owned(),
                namespace: "default".to_owned(),
                uid: "uid-a".to_owned(),
                annotations: BTreeMap::from([(SOURCE.to_owned(), "api".to_owned())]),
            }),
            spec: Some(wire::PodSpec {
                node_name: "node-1".to_owned(),
                ..wire::PodSpec::default()
            }),
            status: None,
        }
    }

    fn read(pods: &[wire::Pod]) -> Result<Vec<NodePod>, String> {
        let encoded: Vec<_> = pods.iter().map(Message::encode_to_vec).collect();
        node_pods(&encoded, &node()).map_err(|error| error.to_string())
    }

    #[test]
    fn pod_reads_claims_group_and_phase() {
        let mut full = pod();
        let (spec, text) = (full.spec.as_mut().unwrap(), str::to_owned);
        spec.scheduling_group = Some(wire::PodSchedulingGroup {
            pod_group_name: text("train"),
        });
        let claim = |name: &str| wire::PodResourceClaim {
            name: text("x"),
            resource_claim_name: text(name),
        };
        spec.resource_claims = vec![claim("named"), claim("")];
        let made = |name: &str| wire::PodResourceClaimStatus {
            name: text("x"),
            resource_claim_name: text(name),
        };
        let extended = wire::PodExtendedResourceClaimStatus {
            resource_claim_name: text("extended"),
        };
        full.status = Some(wire::PodStatus {
            phase: text("Failed"),
            resource_claim_statuses: vec![made("made"), made("")],
            extended_resource_claim_status: Some(extended),
        });
        let name = |text: &str| ObjectName::new(text).unwrap();
        let expected = NodePod {
            namespace: name("default"),
            uid: Uid::new("uid-a").unwrap(),
            group: Some(name("train")),
            finished: true,
            claims: ["named", "made", "extended"].map(name).to_vec(),
        };
        assert_eq!(read(&[full]), Ok(vec![expected]));
        let plain = &read(&[pod()]).unwrap()[0];
        assert_eq!(
            (plain.finished, &plain.group, plain.claims.len()),
            (false, &None, 0)
        );
    }

    #[test]
    fn complete_list_has_an_api_pod() {
        let of = |source: &str| {
            let mut pod = pod();
            pod.metadata.as_mut().unwrap().annotations =
                BTreeMap::from([(SOURCE.to_owned(), source.to_owned())]);
            pod
        };
        for pods in [vec![], vec![of("file")], vec![of("file"), of("http")]] {
            assert!(
                read(&pods).unwrap_err().contains("not complete"),
                "{pods:?}"
            );
        }
        assert_eq!(read(&[of("file"), of("api")]).unwrap().len(), 2);
    }

    #[test]
    fn malformed_pod_refuses_the_list() {
        let bad = |change: fn(&mut wire::Pod)| {
            let mut pod = pod();
            change(&mut pod);
            read(&[super::tests::pod(), pod]).unwrap_err()
        };
        fn claim(pod: &mut wire::Pod, name: &str) {
            let claim = wire::PodResourceClaim {
                name: String::new(),
                resource_claim_name: name.to_owned(),
            };
            pod.spec.as_mut().unwrap().resource_claims.push(claim);
        }
        for (error, parts) in [
            (
                bad(|pod| pod.metadata.as_mut().unwrap().uid.clear()),
                ["default/a", "metadata.uid"],
            ),
            (
                bad(|pod| pod.metadata.as_mut().unwrap().namespace = "A".to_owned()),
                ["A/a", "metadata.namespace"],
            ),
            (bad(|pod| pod.metadata = None), ["/", "metadata.namespace"]),
            (
                bad(|pod| pod.spec = None),
                ["default/a", "not of this node"],
            ),
            (
                bad(|pod| pod.spec.as_mut().unwrap().node_name = "node-2".to_owned()),
                ["default/a", "this node"],
            ),
            (
                bad(|pod| claim(pod, "a/b")),
                ["a claim of pod default/a", "a/b"],
            ),
        ] {
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
        let error = node_pods(&[b"\xff\xff".as_slice()], &node()).unwrap_err();
        assert!(matches!(error, KubeletPodsError::Malformed(_)), "{error}");
        let many = vec![Vec::new(); NODE_PODS_MAX + 1];
        assert!(
            node_pods(&many, &node())
                .unwrap_err()
                .to_string()
                .contains("10000 pods")
        );
    }

    proptest! {
        /// Checks that any bytes from a kubelet are an error, or pods of this node.
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut joined = pod().encode_to_vec();
            joined.extend_from_slice(&bytes);
            for encoded in [bytes, joined] {
                if let Ok(pods) = node_pods(&[encoded], &node()) {
                    prop_assert_eq!(pods.len(), 1);
                }
            }
        }
    }
}
