//! Choice of this node's name at a start. Claims, slices and the Node object of the local API have it, so the checkpoint keeps it.
//!
//! A node keeps its name when its host is renamed, and sets a condition. A name from the config or a flag is taken if no claim has devices
//! under the previous one; the commit that writes it removes the Node object and the slices of the old name. With claims the start is
//! refused. The record keeps the former names, of which a cluster may still have objects (`kube/src/slices/former.rs`). The decision is pure.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use anyhow::Result;
use serde_json::{Value, json};

use crate::config::NodeName;
use nodedock_base::clock::now_ms;
use nodedock_base::conditions::Conditions;
use nodedock_core::checkpoint::{Change, Dump};
use nodedock_model::{
    ApiObject, DELETED_REVISION_KEY, NodeRecord, ObjectName, Problem, ProblemCode, Uid,
};

/// Claims that an error names.
const CLAIMS_NAMED_MAX: usize = 8;
/// Subject of the condition.
const SUBJECT: &str = "node";

/// Decision about the name.
#[derive(Debug, PartialEq, Eq)]
enum Decision {
    Take,
    /// The host has another name, and the node keeps its own.
    Keep(ObjectName),
    Refuse(RenameRefused),
}

/// Claims have devices under the name that the node has.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
struct RenameRefused {
    from: ObjectName,
    to: ObjectName,
    claims: BTreeSet<String>,
}

impl fmt::Display for RenameRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, to, claims } = self;
        let named: Vec<_> = claims
            .iter()
            .take(CLAIMS_NAMED_MAX)
            .map(String::as_str)
            .collect();
        let more = match claims.len() - named.len() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        write!(
            f,
            "this node is named {from:?} and cannot be renamed to {to:?} while claims have its devices: {}{more}; start it with \
            --node-name {from} (nodeName in the config), end them with nodedock unprepare NAMESPACE/POD and nodedock claim delete NAME \
            (nodedock release claim NAME for one whose driver is gone), and rename it then",
            named.join(", ")
        )
    }
}

/// Decides on the name, which the dump has then with nothing of a former one, and returns what changes in the checkpoint.
pub(super) fn settle(
    wanted: &NodeName,
    dump: &mut Dump,
    conditions: &Conditions,
) -> Result<Vec<Change>> {
    let recorded = dump.node.as_ref().map(|record| record.name.clone());
    let name = match decide(wanted, recorded.as_ref(), claims_with_devices(dump)) {
        Decision::Take => wanted.name.clone(),
        Decision::Keep(name) => {
            conditions.set(SUBJECT, kept(&name, &wanted.name));
            name
        }
        Decision::Refuse(refused) => return Err(refused.into()),
    };
    if recorded.as_ref() == Some(&name) {
        return Ok(Vec::new());
    }
    let (removed, revision) = match recorded {
        Some(former) => {
            tracing::info!(%former, %name, "the node has another name");
            removed(&dump.objects, &former)
        }
        None => Default::default(),
    };
    let record = match dump.node.take() {
        Some(known) => known.renamed(name, now_ms()),
        None => NodeRecord::new(name, now_ms()),
    };
    let mut changes = vec![Change::PutNode(Arc::new(record.clone()))];
    changes.extend(removed.iter().cloned().map(Change::DeleteObject));
    changes.extend(
        revision
            .iter()
            .cloned()
            .map(|revision| Change::PutObject(Arc::new(revision))),
    );
    dump.objects.retain(|object| !removed.contains(&object.uid));
    if let Some(revision) = revision {
        dump.objects.retain(|object| object.uid != revision.uid);
        dump.objects.push(revision);
    }
    dump.node = Some(record);
    Ok(changes)
}

/// `known`: the name that the checkpoint has. `claims`: those with devices under it.
fn decide(wanted: &NodeName, known: Option<&ObjectName>, claims: BTreeSet<String>) -> Decision {
    match known {
        None => Decision::Take,
        Some(known) if *known == wanted.name => Decision::Take,
        Some(known) if !wanted.is_configured => Decision::Keep(known.clone()),
        Some(_) if claims.is_empty() => Decision::Take,
        Some(known) => Decision::Refuse(RenameRefused {
            from: known.clone(),
            to: wanted.name.clone(),
            claims,
        }),
    }
}

/// The claims with devices here, by namespace and name: of the checkpoint, and those that the local API allocated.
fn claims_with_devices(dump: &Dump) -> BTreeSet<String> {
    let prepared = dump
        .claims
        .iter()
        .map(|claim| format!("{}/{}", claim.id.namespace, claim.id.name));
    let unreadable = dump
        .unreadable_claims()
        .into_iter()
        .map(|uid| format!("the unreadable claim {uid}"));
    let allocated = dump
        .objects
        .iter()
        .filter(|object| !pools_of_claim(object).is_empty());
    let allocated = allocated.map(|claim| {
        format!(
            "{}/{}",
            text(&claim.object, "/metadata/namespace"),
            text(&claim.object, "/metadata/name")
        )
    });
    prepared.chain(unreadable).chain(allocated).collect()
}

/// The pools of an allocated claim's devices; none of any other object.
fn pools_of_claim(object: &ApiObject) -> Vec<&str> {
    let results = object
        .object
        .pointer("/status/allocation/devices/results")
        .and_then(Value::as_array);
    let results = results.filter(|_| object.resource == "resourceclaims");
    results
        .into_iter()
        .flatten()
        .map(|result| text(result, "/pool"))
        .collect()
}

/// Returns the Node object and the slices of the former name, by UID. With them the record of the last revision, so that none is given twice.
fn removed(objects: &[ApiObject], former: &ObjectName) -> (BTreeSet<Uid>, Option<ApiObject>) {
    let removed: BTreeSet<_> = objects
        .iter()
        .filter(|object| is_of_node(object, former))
        .map(|object| object.uid.clone())
        .collect();
    let last = objects
        .iter()
        .filter_map(revision)
        .max()
        .unwrap_or_default();
    let record = (!removed.is_empty()).then(|| ApiObject {
        uid: Uid::new(DELETED_REVISION_KEY).expect("it has letters and a dash only"),
        resource: String::new(),
        object: Arc::new(json!({ "resourceVersion": last })),
    });
    (removed, record)
}

fn revision(object: &ApiObject) -> Option<u64> {
    match object.resource.as_str() {
        "" => object.object["resourceVersion"].as_u64(),
        _ => text(&object.object, "/metadata/resourceVersion")
            .parse()
            .ok(),
    }
}

fn is_of_node(object: &ApiObject, node: &ObjectName) -> bool {
    match object.resource.as_str() {
        "nodes" => text(&object.object, "/metadata/name") == node.as_str(),
        "resourceslices" => text(&object.object, "/spec/nodeName") == node.as_str(),
        _ => false,
    }
}

fn text<'a>(value: &'a Value, at: &str) -> &'a str {
    value
        .pointer(at)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

/// The condition of a node that keeps its name.
fn kept(name: &ObjectName, host: &ObjectName) -> Problem {
    let message = format!(
        "the host is named {host:?} now, and this node keeps the name {name:?}, which its claims and slices have: set nodeName to {name} in the config to keep it, or end all claims, set nodeName to {host} and restart the daemon to rename the node"
    );
    Problem::conflict(ProblemCode::NodeNameKept, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_core::checkpoint;

    fn name(text: &str) -> ObjectName {
        ObjectName::new(text).unwrap()
    }

    fn object(resource: &str, uid: &str, object: Value) -> ApiObject {
        ApiObject {
            uid: Uid::new(uid).unwrap(),
            resource: resource.to_owned(),
            object: Arc::new(object),
        }
    }

    fn node(of: &str) -> ApiObject {
        let metadata = json!({ "name": of, "resourceVersion": "7" });
        object(
            "nodes",
            &format!("node-{of}"),
            json!({ "metadata": metadata }),
        )
    }

    fn slice(of: &str) -> ApiObject {
        object(
            "resourceslices",
            &format!("slice{of}"),
            json!({ "spec": { "nodeName": of } }),
        )
    }

    fn claim(of: &str, pool: Option<&str>) -> ApiObject {
        let results: Vec<_> = pool.iter().map(|pool| json!({ "pool": pool })).collect();
        let status = match results.is_empty() {
            true => json!({}),
            false => json!({ "allocation": { "devices": { "results": results } } }),
        };
        let metadata = json!({ "name": of, "namespace": "default", "resourceVersion": "9" });
        object(
            "resourceclaims",
            &format!("claim-{of}"),
            json!({ "metadata": metadata, "status": status }),
        )
    }

    fn wanted(text: &str, is_configured: bool) -> NodeName {
        NodeName {
            name: name(text),
            is_configured,
        }
    }

    #[test]
    fn only_config_renames_an_unused_node() {
        let (none, one) = (BTreeSet::new, || BTreeSet::from(["default/a".to_owned()]));
        let old = name("old");
        for (wanted, known, claims, decision) in [
            (wanted("new", false), None, one(), Decision::Take),
            (wanted("new", true), None, one(), Decision::Take),
            (wanted("old", false), Some(&old), one(), Decision::Take),
            (wanted("old", true), Some(&old), one(), Decision::Take),
            (
                wanted("new", false),
                Some(&old),
                none(),
                Decision::Keep(old.clone()),
            ),
            (
                wanted("new", false),
                Some(&old),
                one(),
                Decision::Keep(old.clone()),
            ),
            (wanted("new", true), Some(&old), none(), Decision::Take),
        ] {
            assert_eq!(
                decide(&wanted, known, claims),
                decision,
                "{wanted:?} {known:?}"
            );
        }
        let many: BTreeSet<_> = (0..10).map(|n| format!("default/c{n}")).collect();
        let Decision::Refuse(refused) = decide(&wanted("new", true), Some(&old), many) else {
            panic!()
        };
        let text = refused.to_string();
        for part in [
            "\"old\"",
            "\"new\"",
            "default/c7 and 2 more",
            "--node-name old",
            "nodedock unprepare",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("c8"), "{text}");
    }

    #[test]
    fn former_names_are_bounded() {
        let mut record = NodeRecord::new(name("n0"), 0);
        for n in 1..12 {
            record = record.renamed(name(&format!("n{n}")), n);
        }
        let former = |record: &NodeRecord| {
            let former = record.former.iter();
            former.map(|it| it.name.to_string()).collect::<Vec<_>>()
        };
        let names = former(&record);
        assert_eq!(names.len(), NodeRecord::FORMER_MAX);
        assert_eq!((&*names[0], &*names[7]), ("n3", "n10"));
        let back = record.renamed(name("n5"), 12);
        assert!(!former(&back).contains(&"n5".to_owned()), "it has it again");
        assert_eq!(former(&back).last().unwrap(), "n11");
    }

    async fn settled(
        path: &std::path::Path,
        wanted: &NodeName,
        more: Vec<ApiObject>,
    ) -> (Result<String>, Dump, Conditions) {
        let before = checkpoint::open(path).unwrap().checkpoint;
        let puts = more
            .into_iter()
            .map(|object| Change::PutObject(Arc::new(object)))
            .collect();
        before.commit(puts).await.unwrap();
        before.close().await;
        let conditions = Conditions::default();
        let opened = checkpoint::open_or_recover(
            path,
            || Ok(Vec::new()),
            |dump: &mut Dump| settle(wanted, dump, &conditions),
        );
        let named = opened.map(|opened| {
            (
                opened.dump.node.as_ref().unwrap().name.to_string(),
                opened.dump,
            )
        });
        let (named, dump) = match named {
            Ok((name, dump)) => (Ok(name), dump),
            Err(error) => (Err(error), Dump::default()),
        };
        (named, dump, conditions)
    }

    #[tokio::test]
    async fn node_rename_removes_old_node_objects() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("checkpoint.db");
        let objects = vec![
            node("old"),
            slice("old"),
            slice("new"),
            slice(""),
            claim("waits", None),
        ];
        let (first, ..) = settled(&path, &wanted("old", true), objects).await;
        assert_eq!(first.unwrap(), "old");
        let (renamed, dump, conditions) = settled(&path, &wanted("new", true), Vec::new()).await;
        assert_eq!(
            (renamed.unwrap(), conditions.list().len()),
            ("new".to_owned(), 0)
        );
        let former = dump.node.as_ref().map(|node| node.former.clone());
        let former = former.unwrap_or_default();
        assert_eq!(former.len(), 1, "a cluster may have objects of it");
        assert_eq!(former[0].name, name("old"));
        let mut left: Vec<_> = dump
            .objects
            .iter()
            .map(|object| object.uid.to_string())
            .collect();
        left.sort();
        assert_eq!(
            left,
            ["claim-waits", DELETED_REVISION_KEY, "slice", "slicenew"]
        );
        let mut stored = checkpoint::open(&path).unwrap().dump;
        stored.objects.sort_by(|a, b| a.uid.cmp(&b.uid));
        let revision = stored
            .objects
            .iter()
            .find(|object| object.uid.as_str() == DELETED_REVISION_KEY);
        assert_eq!(*revision.unwrap().object, json!({ "resourceVersion": 9 }));
        assert_eq!(stored.objects.len(), 4);
        assert_eq!(stored.node.unwrap().name, name("new"));
        // And back, and a host with another name.
        assert_eq!(
            settled(&path, &wanted("old", true), Vec::new())
                .await
                .0
                .unwrap(),
            "old"
        );
        let (kept, _, conditions) = settled(&path, &wanted("new", false), Vec::new()).await;
        assert_eq!(kept.unwrap(), "old");
        let [condition] = &conditions.list()[..] else {
            panic!("one condition")
        };
        assert!(
            condition.problem.message.contains("\"new\" now"),
            "{}",
            condition.problem.message
        );
    }

    #[tokio::test]
    async fn allocated_claim_blocks_a_rename() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("checkpoint.db");
        let objects = vec![node("old"), slice("old"), claim("a", Some("old/gpus"))];
        let (first, ..) = settled(&path, &wanted("old", true), objects).await;
        assert_eq!(first.unwrap(), "old");
        let (refused, ..) = settled(&path, &wanted("new", true), Vec::new()).await;
        assert!(refused.unwrap_err().to_string().contains("default/a"));
        let stored = checkpoint::open(&path).unwrap().dump;
        assert_eq!(
            (stored.objects.len(), stored.node.unwrap().name),
            (3, name("old"))
        );
        let (kept, ..) = settled(&path, &wanted("new", false), Vec::new()).await;
        assert_eq!(kept.unwrap(), "old");
        let (refused, ..) = settled(&path, &wanted("new", true), Vec::new()).await;
        assert!(refused.is_err());
    }
}
