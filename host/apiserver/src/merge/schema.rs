//! Merge rules for the lists and structs of the served kinds: the markers `listType`, `listMapKey`, `structType` and the tags
//! `patchMergeKey` of k8s.io/api 0.37.2, and the fields that their resources and subresources do not write.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde_json::Value;

/// Treatment of a field by server-side apply.
#[derive(Clone, Copy, Debug)]
pub(super) enum Rule {
    /// An object is merged by its fields, a list is replaced.
    Plain,
    /// A value of any type, which is replaced as a whole.
    Atomic,
    /// A list of scalars, each of which has its own owners.
    Set,
    /// A list of objects with these keys, separated by commas; `key=value` for a key with a default.
    Keys(&'static str),
    /// An object with fields of its own table.
    Struct(&'static [Row]),
}

/// A path below the kind (`a.b[].c`), its rule, and the merge key of a list that a strategic merge patch merges (none for scalars: ``).
type Row = (&'static str, Rule, Option<&'static str>);

use Rule::{Atomic, Keys, Plain, Set, Struct};

const METADATA: &[Row] = &[
    ("finalizers", Set, Some("")),
    ("ownerReferences", Keys("uid"), Some("uid")),
    ("ownerReferences[]", Atomic, None),
];

const CONDITIONS: Row = ("status.conditions", Keys("type"), Some("type"));

const CONTAINER: &[Row] = &[
    ("env", Keys("name"), Some("name")),
    ("env[].valueFrom.configMapKeyRef", Atomic, None),
    ("env[].valueFrom.fieldRef", Atomic, None),
    ("env[].valueFrom.fileKeyRef", Atomic, None),
    ("env[].valueFrom.resourceFieldRef", Atomic, None),
    ("env[].valueFrom.secretKeyRef", Atomic, None),
    (
        "ports",
        Keys("containerPort,protocol=TCP"),
        Some("containerPort"),
    ),
    ("resources.claims", Keys("name"), None),
    ("volumeDevices", Keys("devicePath"), Some("devicePath")),
    ("volumeMounts", Keys("mountPath"), Some("mountPath")),
    ("volumeMounts[].bindMountOptions", Set, None),
];

const CONTAINER_STATUS: &[Row] = &[
    ("allocatedResourcesStatus", Plain, Some("name")),
    ("volumeMounts", Plain, Some("mountPath")),
];

const VOLUME: &[Row] = &[
    ("cephfs.secretRef", Atomic, None),
    ("cinder.secretRef", Atomic, None),
    ("csi.nodePublishSecretRef", Atomic, None),
    (
        "ephemeral.volumeClaimTemplate.metadata",
        Struct(METADATA),
        None,
    ),
    (
        "ephemeral.volumeClaimTemplate.spec.dataSource",
        Atomic,
        None,
    ),
    ("ephemeral.volumeClaimTemplate.spec.selector", Atomic, None),
    ("flexVolume.secretRef", Atomic, None),
    ("iscsi.secretRef", Atomic, None),
    ("rbd.secretRef", Atomic, None),
    ("scaleIO.secretRef", Atomic, None),
    ("storageos.secretRef", Atomic, None),
];

const POD: &[Row] = &[
    (
        "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution",
        Atomic,
        None,
    ),
    ("spec.containers", Keys("name"), Some("name")),
    ("spec.containers[]", Struct(CONTAINER), None),
    ("spec.ephemeralContainers", Keys("name"), Some("name")),
    ("spec.ephemeralContainers[]", Struct(CONTAINER), None),
    ("spec.initContainers", Keys("name"), Some("name")),
    ("spec.initContainers[]", Struct(CONTAINER), None),
    ("spec.evictionResponders", Keys("name"), Some("name")),
    ("spec.evictionResponders[]", Atomic, None),
    ("spec.hostAliases", Keys("ip"), Some("ip")),
    ("spec.imagePullSecrets", Keys("name"), Some("name")),
    ("spec.imagePullSecrets[]", Atomic, None),
    ("spec.nodeSelector", Atomic, None),
    ("spec.resourceClaims", Keys("name"), Some("name")),
    ("spec.resources.claims", Keys("name"), None),
    ("spec.schedulingGates", Keys("name"), Some("name")),
    (
        "spec.topologySpreadConstraints",
        Keys("topologyKey,whenUnsatisfiable"),
        Some("topologyKey"),
    ),
    (
        "spec.topologySpreadConstraints[].labelSelector",
        Atomic,
        None,
    ),
    ("spec.volumes", Keys("name"), Some("name")),
    ("spec.volumes[]", Struct(VOLUME), None),
    CONDITIONS,
    ("status.containerStatuses[]", Struct(CONTAINER_STATUS), None),
    (
        "status.ephemeralContainerStatuses[]",
        Struct(CONTAINER_STATUS),
        None,
    ),
    (
        "status.initContainerStatuses[]",
        Struct(CONTAINER_STATUS),
        None,
    ),
    ("status.hostIPs", Plain, Some("ip")),
    (
        "status.nodeAllocatableResourceClaimStatuses",
        Keys("resourceClaimName"),
        Some("resourceClaimName"),
    ),
    (
        "status.nodeAllocatableResourceClaimStatuses[].containers",
        Set,
        None,
    ),
    (
        "status.nodeAllocatableResourceClaimStatuses[].mapping",
        Keys("name"),
        Some("name"),
    ),
    (
        "status.nodeAllocatableResourceClaimStatuses[].overhead",
        Keys("name"),
        Some("name"),
    ),
    ("status.podIPs", Keys("ip"), Some("ip")),
    ("status.resourceClaimStatuses", Keys("name"), Some("name")),
    ("status.resources.claims", Keys("name"), None),
    ("status.volumeHealth", Keys("name"), None),
    (
        "status.volumeHealth[].healthConditions",
        Keys("status,reason"),
        Some("status"),
    ),
];

const NODE: &[Row] = &[
    ("spec.podCIDRs", Set, Some("")),
    (
        "spec.podPreemptionPolicy.disableResizePreemption",
        Set,
        None,
    ),
    ("status.addresses", Keys("type"), Some("type")),
    CONDITIONS,
];

/// Both groups' events: they have no list, and no field of the same name with another rule.
const EVENT: &[Row] = &[
    ("involvedObject", Atomic, None),
    ("regarding", Atomic, None),
    ("related", Atomic, None),
];

const RESOURCE_CLAIM: &[Row] = &[
    ("status.allocation.nodeSelector", Atomic, None),
    ("status.devices", Keys("driver,device,pool,shareID"), None),
    ("status.devices[].conditions", Keys("type"), None),
    ("status.devices[].data", Atomic, None),
    ("status.reservedFor", Keys("uid"), Some("uid")),
];

const RESOURCE_SLICE: &[Row] = &[
    ("spec.nodeSelector", Atomic, None),
    ("spec.skipNodeOperations", Set, None),
];

/// Kinds, their tables, and the fields that every object of the kind has, since they are neither optional nor pointers: creation of an
/// object adds no such field, it changes it.
const KINDS: &[(&str, &[Row], &str)] = &[
    (
        "Namespace",
        &[CONDITIONS],
        r#"{"metadata":{},"spec":{},"status":{}}"#,
    ),
    (
        "Node",
        NODE,
        r#"{"metadata":{},"spec":{},"status":{"daemonEndpoints":{"kubeletEndpoint":{"Port":0}},"nodeInfo":{"machineID":"",
        "systemUUID":"","bootID":"","kernelVersion":"","osImage":"","containerRuntimeVersion":"","kubeletVersion":"",
        "kubeProxyVersion":"","operatingSystem":"","architecture":""}}}"#,
    ),
    (
        "Pod",
        POD,
        r#"{"metadata":{},"spec":{"containers":null},"status":{}}"#,
    ),
    (
        "Event",
        EVENT,
        r#"{"metadata":{},"involvedObject":{},"source":{},"firstTimestamp":null,"lastTimestamp":null,"eventTime":null,
        "reportingComponent":"","reportingInstance":"","regarding":{},"deprecatedSource":{},"deprecatedFirstTimestamp":null,
        "deprecatedLastTimestamp":null}"#,
    ),
    (
        "ResourceClaim",
        RESOURCE_CLAIM,
        r#"{"metadata":{},"spec":{"devices":{"requests":null}},"status":{}}"#,
    ),
    (
        "ResourceClaimTemplate",
        &[("spec.metadata", Struct(METADATA), None)],
        r#"{"metadata":{},"spec":{"metadata":{},"spec":{"devices":{"requests":null}}}}"#,
    ),
    ("DeviceClass", &[], r#"{"metadata":{},"spec":{}}"#),
    (
        "ResourceSlice",
        RESOURCE_SLICE,
        r#"{"metadata":{},"spec":{"driver":"","pool":{"name":"","generation":0,"resourceSliceCount":0}}}"#,
    ),
    (
        "DeviceTaintRule",
        &[CONDITIONS],
        r#"{"metadata":{},"spec":{"taint":{"key":"","effect":""}},"status":{}}"#,
    ),
];

/// A field, or the element of a list.
#[derive(Debug)]
pub(super) struct Field {
    pub(super) rule: Rule,
    /// The merge key of a list that a strategic merge patch merges; empty for a list of scalars.
    pub(super) merge_key: Option<&'static str>,
    children: BTreeMap<&'static str, Field>,
}

/// Field that the table does not name.
static PLAIN: Field = Field {
    rule: Plain,
    merge_key: None,
    children: BTreeMap::new(),
};

/// The name of a list's element among its children.
const ELEMENT: &str = "[]";

impl Field {
    pub(super) fn child(&self, name: &str) -> &Self {
        self.children.get(name).unwrap_or(&PLAIN)
    }

    pub(super) fn element(&self) -> &Self {
        self.child(ELEMENT)
    }

    fn add(&mut self, rows: &[Row]) {
        for (path, rule, merge_key) in rows {
            let steps = path
                .split('.')
                .flat_map(|step| match step.strip_suffix(ELEMENT) {
                    Some(list) => [Some(list), Some(ELEMENT)],
                    None => [Some(step), None],
                });
            let field = steps.flatten().fold(&mut *self, |field, step| {
                field.children.entry(step).or_insert(Self {
                    rule: Plain,
                    merge_key: None,
                    children: BTreeMap::new(),
                })
            });
            field.merge_key = *merge_key;
            match rule {
                Struct(rows) => field.add(rows),
                _ => field.rule = *rule,
            }
        }
    }
}

/// A kind's fields, and what every object of it has.
#[derive(Debug)]
pub(super) struct Kind {
    pub(super) root: Field,
    pub(super) minimal: Value,
}

/// Returns the rules of a kind; of another kind, those of its metadata.
pub(super) fn of(kind: &str) -> &'static Kind {
    static READ: LazyLock<BTreeMap<&'static str, Kind>> = LazyLock::new(|| {
        KINDS
            .iter()
            .map(|(kind, rows, minimal)| (*kind, read(rows, minimal)))
            .collect()
    });
    static OTHER: LazyLock<Kind> = LazyLock::new(|| read(&[], r#"{"metadata":{}}"#));
    READ.get(kind).unwrap_or(&OTHER)
}

fn read(rows: &[Row], minimal: &str) -> Kind {
    let mut root = Field {
        rule: Plain,
        merge_key: None,
        children: BTreeMap::new(),
    };
    root.add(&[("metadata", Struct(METADATA), None)]);
    root.add(rows);
    Kind {
        root,
        minimal: serde_json::from_str(minimal).unwrap_or_default(),
    }
}

/// Returns the fields that a write of this resource or subresource leaves as they are: their paths.
pub(super) fn unwritten(kind: &str, subresource: &str) -> &'static [&'static [&'static str]] {
    match (kind, subresource) {
        ("ResourceClaim" | "DeviceTaintRule", "status") => &[&["metadata"], &["spec"]],
        ("Pod", "status") => &[
            &["spec"],
            &["metadata", "deletionTimestamp"],
            &["metadata", "ownerReferences"],
        ],
        ("Node" | "Namespace", "status") => &[&["spec"]],
        ("ResourceClaim" | "DeviceTaintRule" | "Pod" | "Node", "")
        | ("Namespace", "" | "finalize") => &[&["status"]],
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_read_with_their_parts() {
        let pod = &of("Pod").root;
        let env = pod
            .child("spec")
            .child("initContainers")
            .element()
            .child("env");
        assert!(
            matches!(env.rule, Keys("name")) && env.merge_key == Some("name"),
            "{env:?}"
        );
        let owners = of("Lease").root.child("metadata").child("ownerReferences");
        assert!(
            matches!((owners.rule, owners.element().rule), (Keys("uid"), Atomic)),
            "{owners:?}"
        );
        assert!(matches!(pod.child("spec").child("tolerations").rule, Plain));
        for (kind, _, _) in KINDS {
            assert!(of(kind).minimal["metadata"].is_object(), "{kind}");
        }
    }
}
