//! Slices: stored as they are written, and changed with the driver's inventory.

use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_NAME};
use serde_json::{Value, json};

use crate::scene::{SLICES, Scene};

impl Scene {
    /// The devices that the daemon has, as they are published: `NODE/POOL/DEVICE`, sorted.
    async fn devices(&self) -> Vec<String> {
        let devices = self.daemon.devices().await;
        let mut names: Vec<_> = devices
            .iter()
            .map(|device| format!("{}/{}", device.pool, device.name))
            .collect();
        names.sort();
        names
    }
}

/// The paths of what `sent` has and `stored` has not, or has otherwise.
fn lost(sent: &Value, stored: &Value, path: &str, all: &mut Vec<String>) {
    match (sent, stored) {
        (Value::Object(sent), Value::Object(_)) => {
            sent.iter()
                .for_each(|(key, value)| lost(value, &stored[key], &format!("{path}.{key}"), all));
        }
        (Value::Array(sent), Value::Array(kept)) if sent.len() == kept.len() => {
            sent.iter()
                .zip(kept)
                .for_each(|(sent, kept)| lost(sent, kept, &format!("{path}[]"), all));
        }
        _ if sent == stored => {}
        _ => all.push(format!("{path}: {sent} became {stored}")),
    }
}

#[tokio::test]
async fn slices_keep_fields_and_follow_inventory() {
    let Some(scene) = Scene::start("slices").await else {
        return;
    };
    scene.daemon.serve(MOCK_GPU, Form::Core).await;
    let shipped = scene.devices().await;
    assert!(shipped.len() > 8, "{shipped:?}");
    let slices = scene.until_published(MOCK_GPU_NAME, &shipped).await;
    let owner = &slices[0]["metadata"]["ownerReferences"][0];
    assert_eq!(
        (&owner["kind"], &owner["name"]),
        (&"Node".into(), &scene.node.clone().into()),
        "{owner}"
    );

    // A device more, one less, and one that is unhealthy.
    scene.daemon.drop_in(
        "mock-gpu.config.yaml",
        "pools: [{name: gpus, count: 4, firstIndex: 1, unhealthy: [{index: 2, message: too hot}]}, \
         {name: shared, count: 1, firstIndex: 9, shared: true, memoryGiB: 24}]\n",
    );
    let wanted: Vec<_> = (1..5)
        .map(|number| format!("slices/gpus/gpu-{number}"))
        .collect();
    let wanted: Vec<_> = wanted
        .into_iter()
        .chain(["slices/shared/gpu-9".to_owned()])
        .collect();
    let slices = scene.until_published(MOCK_GPU_NAME, &wanted).await;
    let devices = slices
        .iter()
        .flat_map(|slice| slice["spec"]["devices"].as_array().into_iter().flatten());
    let tainted: Vec<_> = devices
        .filter(|device| device["taints"].is_array())
        .collect();
    assert!(
        tainted.len() == 1 && tainted[0]["name"] == "gpu-2",
        "{tainted:#?}"
    );
    assert_eq!(tainted[0]["taints"][0]["effect"], "NoSchedule");

    let writes: Vec<_> = scene
        .requests()
        .into_iter()
        .filter(|event| event["requestObject"].is_object())
        .collect();
    let of = |verb: &str| writes.iter().filter(|event| event["verb"] == verb).count();
    assert!(of("create") > 0 && of("update") > 0, "{writes:#?}");
    for event in &writes {
        assert!(
            event["responseStatus"]["code"]
                .as_u64()
                .is_some_and(|code| code < 300),
            "{event:#}"
        );
        let mut all = Vec::new();
        lost(
            &event["requestObject"]["spec"],
            &event["responseObject"]["spec"],
            "spec",
            &mut all,
        );
        assert!(all.is_empty(), "{all:#?}");
    }
    scene.assert_nothing_forbidden();
}

#[tokio::test]
async fn changed_or_foreign_slices_are_repaired() {
    let Some(scene) = Scene::with_gpus("edits", "pools: [{name: gpus, count: 2}]\n").await else {
        return;
    };
    let wanted = ["edits/gpus/gpu-0", "edits/gpus/gpu-1"].map(str::to_owned);
    let mut slice = scene
        .until_published(MOCK_GPU_NAME, &wanted)
        .await
        .remove(0);
    let path = format!(
        "{SLICES}/{}",
        slice["metadata"]["name"]
            .as_str()
            .expect("a slice has a name")
    );

    slice["spec"]["devices"] = json!([{"name": "made-up"}]);
    scene.api.put(&path, &slice).await.done();
    scene.until_published(MOCK_GPU_NAME, &wanted).await;
    scene.api.delete(&path).await.done();
    scene.until_published(MOCK_GPU_NAME, &wanted).await;

    let pool = json!({"name": "edits/other", "generation": 1, "resourceSliceCount": 1});
    let spec = json!({
        "driver": MOCK_GPU_NAME, "nodeName": scene.node, "pool": pool, "devices": [{"name": "made-up"}],
    });
    scene
        .api
        .post(
            SLICES,
            &json!({"metadata": {"name": "made-up"}, "spec": spec}),
        )
        .await
        .done();
    scene.until_published(MOCK_GPU_NAME, &wanted).await;
    scene.assert_nothing_forbidden();
}
