//! kubectl changes objects: by its two ways to apply, by the three kinds of patches, and by an editor.

use nodedock_tests::assert_parts;
use serde_json::{Value, json};

use super::{Machine, claim};

const OBJECT: &str = "resourceclaim/one";

impl Machine {
    async fn labels(&self) -> Value {
        self.get(OBJECT).await["metadata"]["labels"].take()
    }
}

#[tokio::test]
async fn reapplying_changes_only_changed_fields() {
    let Some(machine) = Machine::with_gpus().await else {
        return;
    };
    let first = claim("one", "gpu", json!({ "a": "1", "b": "2" }));
    machine.apply("one", &first).await.done_with(&["created"]);
    machine.until_allocated("one").await;
    machine.apply("one", &first).await.done_with(&["unchanged"]);
    machine
        .kubectl(&["label", OBJECT, "mine=yes"])
        .await
        .done_with(&["labeled"]);

    machine
        .apply("one", &claim("one", "gpu", json!({ "b": "3" })))
        .await
        .done_with(&["configured"]);
    let found = machine.get(OBJECT).await;
    assert_eq!(
        found["metadata"]["labels"],
        json!({ "b": "3", "mine": "yes" })
    );
    assert!(!found["status"]["allocation"].is_null(), "{found:#}");

    let refused = machine
        .apply("one", &claim("one", "other", json!({})))
        .await
        .failed(1);
    assert_parts(&refused, &["spec: Invalid value", "field is immutable"]);
}

#[tokio::test]
async fn foreign_applied_fields_conflict_unless_forced() {
    let Some(machine) = Machine::with_gpus().await else {
        return;
    };
    let with = |color: &str| claim("one", "gpu", json!({ "color": color }));
    let server_side = ["--server-side"];
    machine
        .apply_with("one", &with("red"), &server_side)
        .await
        .done_with(&["one serverside-applied"]);
    machine.until_allocated("one").await;
    let before = machine.get(OBJECT).await;
    machine
        .apply_with("one", &with("red"), &server_side)
        .await
        .done_with(&["one serverside-applied"]);
    assert_eq!(machine.get(OBJECT).await, before);

    let other = ["--server-side", "--field-manager=other"];
    let conflict = machine
        .apply_with("one", &with("blue"), &other)
        .await
        .failed(1);
    assert_parts(
        &conflict,
        &["conflict with \"kubectl\"", ".metadata.labels.color"],
    );
    assert_eq!(machine.labels().await, json!({ "color": "red" }));
    let forced = [&other[..], &["--force-conflicts"]].concat();
    machine
        .apply_with("one", &with("blue"), &forced)
        .await
        .done();
    assert_eq!(machine.labels().await, json!({ "color": "blue" }));

    // What no manager applies any more is gone; what the daemon wrote stays.
    machine
        .apply_with("one", &claim("one", "gpu", json!({})), &other)
        .await
        .done();
    let found = machine
        .kubectl(&["get", OBJECT, "-o", "json", "--show-managed-fields"])
        .await
        .json();
    assert_eq!(found["metadata"].get("labels"), None, "{found:#}");
    assert!(!found["status"]["allocation"].is_null(), "{found:#}");
    let managers = found["metadata"]["managedFields"]
        .as_array()
        .expect("each writer has its fields");
    let is_applier = |entry: &&Value| entry["operation"] == "Apply" && entry["manager"] == "other";
    let fields = &managers.iter().find(is_applier).expect("it applied")["fieldsV1"];
    assert!(
        fields.pointer("/f:spec/f:devices/f:requests").is_some(),
        "{fields:#}"
    );
}

#[tokio::test]
async fn client_side_apply_becomes_server_side() {
    let Some(machine) = Machine::start().await else {
        return;
    };
    machine
        .apply("one", &claim("one", "gpu", json!({ "a": "1", "b": "2" })))
        .await
        .done();
    let less = claim("one", "gpu", json!({ "a": "1" }));
    machine
        .apply_with("one", &less, &["--server-side"])
        .await
        .done_with(&["serverside-applied"]);
    assert_eq!(machine.labels().await, json!({ "a": "1" }));
}

#[tokio::test]
async fn each_patch_type_changes_an_object() {
    let Some(machine) = Machine::with_gpus().await else {
        return;
    };
    machine.allocated("one").await;
    let patch = async |kind: &str, patch: Value| {
        machine
            .kubectl(&["patch", OBJECT, "--type", kind, "-p", &patch.to_string()])
            .await
    };
    patch(
        "merge",
        json!({ "metadata": { "labels": { "a": "1", "b": "2" } } }),
    )
    .await
    .done_with(&["patched"]);
    patch("merge", json!({ "metadata": { "labels": { "a": null } } }))
        .await
        .done();
    assert_eq!(machine.labels().await, json!({ "b": "2" }));
    patch("merge", json!({ "metadata": { "labels": { "b": "2" } } }))
        .await
        .done_with(&["patched (no change)"]);

    let steps = json!([
        { "op": "test", "path": "/metadata/labels/b", "value": "2" },
        { "op": "move", "from": "/metadata/labels/b", "path": "/metadata/labels/c" },
        { "op": "add", "path": "/metadata/labels/a~1b", "value": "3" },
    ]);
    patch("json", steps.clone()).await.done();
    assert_eq!(machine.labels().await, json!({ "c": "2", "a/b": "3" }));
    let failed = patch("json", steps).await.failed(1);
    assert_parts(&failed, &["The request is invalid"]);

    // A strategic patch adds to a list of names, where a merge patch replaces the list.
    let before = machine.get(OBJECT).await["metadata"]["finalizers"].take();
    let [protection] = &before.as_array().expect("an allocated claim is protected")[..] else {
        panic!("{before}")
    };
    let more = json!({ "metadata": { "finalizers": ["example.com/more"] } });
    patch("strategic", more).await.done();
    let mut found = machine.get(OBJECT).await["metadata"]["finalizers"].take();
    let finalizers = found.as_array_mut().expect("a list");
    finalizers.sort_by_key(Value::to_string);
    assert_eq!(
        finalizers[..],
        [json!("example.com/more"), protection.clone()]
    );
    patch(
        "strategic",
        json!({ "metadata": { "$deleteFromPrimitiveList/finalizers": ["example.com/more"] } }),
    )
    .await
    .done();
    assert_eq!(machine.get(OBJECT).await["metadata"]["finalizers"], before);
}

#[tokio::test]
async fn strategic_status_patch_merges_by_uid() {
    let Some(machine) = Machine::with_gpus().await else {
        return;
    };
    machine.allocated("one").await;
    let consumer = |name: &str| json!({ "apiGroup": "example.com", "resource": "jobs", "name": name, "uid": format!("uid-{name}") });
    for name in ["a", "b"] {
        let patch = json!({ "status": { "reservedFor": [consumer(name)] } }).to_string();
        let args = [
            "patch",
            OBJECT,
            "--subresource=status",
            "--type=strategic",
            "-p",
            &patch,
        ];
        machine.kubectl(&args).await.done_with(&["patched"]);
    }
    let mut found = machine.get(OBJECT).await["status"]["reservedFor"].take();
    let consumers = found.as_array_mut().expect("consumers");
    consumers.sort_by_key(Value::to_string);
    assert_eq!(consumers[..], [consumer("a"), consumer("b")]);
    // Without the subresource the status is what it was.
    let patch =
        json!({ "metadata": { "labels": { "a": "1" } }, "status": { "reservedFor": null } })
            .to_string();
    machine
        .kubectl(&["patch", OBJECT, "--type=merge", "-p", &patch])
        .await
        .done();
    assert_eq!(
        machine.get(OBJECT).await["status"]["reservedFor"]
            .as_array()
            .map(Vec::len),
        Some(2)
    );
}

#[tokio::test]
async fn labels_annotations_and_edits_are_written() {
    let Some(machine) = Machine::start().await else {
        return;
    };
    machine
        .apply("one", &claim("one", "gpu", json!({ "color": "red" })))
        .await
        .done();
    machine
        .kubectl(&["label", OBJECT, "color=blue"])
        .await
        .failed_with(1, &["--overwrite"]);
    machine
        .kubectl(&["label", OBJECT, "color=blue", "--overwrite"])
        .await
        .done_with(&["labeled"]);
    machine.kubectl(&["label", OBJECT, "size=big"]).await.done();
    machine
        .kubectl(&["label", OBJECT, "color-"])
        .await
        .done_with(&["unlabeled"]);
    machine
        .kubectl(&["annotate", OBJECT, "note=some text"])
        .await
        .done_with(&["annotated"]);
    machine
        .kubectl(&["label", OBJECT, "size=not a label", "--overwrite"])
        .await
        .failed_with(1, &["size"]);

    let edit = ["edit", OBJECT];
    machine
        .kubectl_edited(&edit, "sed -i s/big/small/")
        .await
        .done_with(&["edited"]);
    let unchanged = machine.kubectl_edited(&edit, "true").await;
    assert_parts(&unchanged.stderr, &["no changes made"]);
    let found = machine.get(OBJECT).await;
    assert_eq!(found["metadata"]["labels"], json!({ "size": "small" }));
    assert_eq!(found["metadata"]["annotations"]["note"], "some text");

    // The object as it was read replaces it once.
    let mut stale = found;
    stale["metadata"]["labels"]["size"] = json!("middle");
    let file = machine.write("replaced.json", stale.to_string());
    let replace = ["replace", "-f", file.to_str().expect("UTF-8")];
    machine.kubectl(&replace).await.done_with(&["replaced"]);
    machine
        .kubectl(&replace)
        .await
        .failed_with(1, &["the object has been modified"]);
    assert_eq!(machine.labels().await, json!({ "size": "middle" }));
}
