//! Claims of pods, from the scheduler's allocation to the end of the pod.

use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_NAME};
use scripted::Script;
use serde_json::{Value, json};

use crate::kubelet::Failure;
use crate::scene::{SCRIPTED_NAME, Scene, cdi_devices, gpus, pod, request};

/// A CEL expression for parts of simulated GPUs.
const PARTITION: &str = "device.attributes[\"mock-gpu.nodedock.dev\"].partition";
/// One for devices that several claims may have.
const SHARED: &str = "device.allowMultipleAllocations == true";

/// A request for a simulated GPU that an expression selects.
fn selected(name: &str, expression: &str) -> Value {
    let mut request = request(name, MOCK_GPU_NAME, 1);
    request["exactly"]["selectors"] = json!([{"cel": {"expression": expression}}]);
    request
}

impl Scene {
    /// Expects the devices in the only CDI file.
    fn assert_rendered(&self, names: &[String]) {
        let mut rendered = self.daemon.only_cdi_file().devices();
        rendered.sort();
        assert_eq!(rendered, names);
    }

    async fn gpus_serve(node: &str) -> Option<Self> {
        let scene = Self::start(node).await?;
        scene.daemon.serve(MOCK_GPU, Form::Core).await;
        scene.kubelet.registered(MOCK_GPU_NAME).await;
        Some(scene)
    }
}

#[tokio::test]
async fn scheduled_claim_is_prepared_and_unprepared() {
    let Some(scene) = Scene::gpus_serve("claims").await else {
        return;
    };
    scene.pod_with_claim("two", gpus(2)).await;
    let names = scene.prepared("two").await;
    assert_eq!(names.len(), 2);
    scene.assert_rendered(&names);
    assert_eq!(
        scene.prepared("two").await,
        names,
        "the same question has the same answer"
    );
    assert_eq!(scene.daemon.only_claim().await.state, "prepared");
    scene.unprepared("two").await;
    scene.daemon.assert_empty().await;
    scene.removed("two").await;

    // Each kind of allocation that the scheduler makes of these devices.
    let mut consumed = selected("memory", SHARED);
    consumed["exactly"]["capacity"] = json!({"requests": {"memory": "4Gi"}});
    let subrequest = json!({"name": "any", "deviceClassName": MOCK_GPU_NAME});
    let first = json!({"name": "first", "firstAvailable": [subrequest]});
    let mut admin = request("admin", MOCK_GPU_NAME, 1);
    admin["exactly"]["adminAccess"] = json!(true);
    let kinds = [
        ("consumed", consumed),
        ("admin", admin),
        ("first", first),
        ("partition", selected("part", PARTITION)),
    ];
    for (name, request) in kinds {
        scene.pod_with_claim(name, json!([request])).await;
        let names = scene.prepared(name).await;
        assert_eq!(names.len(), 1, "{name}");
        scene.assert_rendered(&names);
        scene.unprepared(name).await;
        scene.daemon.assert_empty().await;
        scene.removed(name).await;
    }
    scene.assert_nothing_forbidden();
}

#[tokio::test]
async fn short_pod_claim_costs_one_request() {
    let Some(scene) = Scene::gpus_serve("requests").await else {
        return;
    };
    let names = ["one", "two", "three", "four", "five"];
    for name in names {
        scene.pod_with_claim(name, gpus(1)).await;
        scene.prepared(name).await;
        scene.unprepared(name).await;
        scene.removed(name).await;
    }
    let is_of_claim = |event: &&Value| event["objectRef"]["resource"] == "resourceclaims";
    let requests = scene.requests();
    let of_claims: Vec<_> = requests
        .iter()
        .filter(is_of_claim)
        .map(|event| &event["requestURI"])
        .collect();
    assert_eq!(of_claims.len(), names.len(), "{of_claims:#?}");
}

#[tokio::test]
async fn template_and_shared_claims_are_prepared() {
    let Some(scene) = Scene::gpus_serve("templates").await else {
        return;
    };
    let template =
        json!({"metadata": {"name": "gpu"}, "spec": {"spec": {"devices": {"requests": gpus(1)}}}});
    scene
        .api
        .post(&scene.path("resourceclaimtemplates"), &template)
        .await
        .done();
    let container = || json!({"resources": {"claims": [{"name": "claim"}]}});
    let claims = json!([{"name": "claim", "resourceClaimTemplateName": "gpu"}]);
    scene
        .api
        .post(
            &scene.path("pods"),
            &pod(&scene.node, "templated", claims, container()),
        )
        .await
        .done();
    assert_eq!(scene.prepared("templated").await.len(), 1);

    scene.pod_with_claim("shared", gpus(1)).await;
    let names = scene.prepared("shared").await;
    let claims = json!([{"name": "claim", "resourceClaimName": "shared"}]);
    scene
        .api
        .post(
            &scene.path("pods"),
            &pod(&scene.node, "other", claims, container()),
        )
        .await
        .done();
    assert_eq!(scene.prepared("other").await, names);
    scene.unprepared("shared").await;
    assert_eq!(
        scene.daemon.claims().await.len(),
        2,
        "the other pod still has it"
    );
    scene.unprepared("other").await;
    scene.unprepared("templated").await;
    scene.daemon.assert_empty().await;
    scene.assert_nothing_forbidden();
}

#[tokio::test]
async fn claim_of_two_drivers_is_prepared() {
    let Some(scene) = Scene::gpus_serve("drivers").await else {
        return;
    };
    scene.daemon.install_scripted(&Script::default());
    scene.daemon.until_serving("scripted.wasm").await;
    scene.kubelet.registered(SCRIPTED_NAME).await;
    let requests = json!([
        request("gpu", MOCK_GPU_NAME, 1),
        request("device", SCRIPTED_NAME, 1)
    ]);
    scene.pod_with_claim("both", requests).await;
    let names = scene.prepared("both").await;
    for driver in [MOCK_GPU_NAME, SCRIPTED_NAME] {
        assert!(
            names
                .iter()
                .any(|name| name.starts_with(&format!("{driver}/"))),
            "{names:?}"
        );
    }
    assert_eq!((names.len(), scene.daemon.cdi_files().len()), (2, 2));
    scene.unprepared("both").await;
    scene.daemon.assert_empty().await;
    scene.removed("both").await;
    scene.assert_nothing_forbidden();
}

/// The scheduler gives the device away as soon as the pod is gone from the API, and the kubelet ends it later.
#[tokio::test]
async fn force_deleted_pod_frees_its_device() {
    let Some(scene) = Scene::with_gpus("force", "pools: [{name: gpus, count: 1}]\n").await else {
        return;
    };
    scene.pod_with_claim("first", gpus(1)).await;
    let before = scene.prepared("first").await;
    scene.removed("first").await;
    scene.pod_with_claim("second", gpus(1)).await;
    scene
        .kubelet
        .bound(&scene.node, "second", MOCK_GPU_NAME)
        .await;
    let next = scene
        .kubelet
        .repeat("prepare", &scene.node, "second", MOCK_GPU_NAME);
    let (next, ()) = tokio::join!(next, scene.unprepared("first"));
    let names = cdi_devices(&next.result);
    assert!(
        names.len() == 1 && names != before,
        "{names:?} and {before:?}"
    );
    scene.assert_rendered(&names);
    scene.unprepared("second").await;
    scene.daemon.assert_empty().await;
    scene.removed("second").await;
    scene.assert_nothing_forbidden();
}

#[tokio::test]
async fn unhealthy_device_is_in_pod_status() {
    let Some(scene) = Scene::with_gpus("health", "pools: [{name: gpus, count: 1}]\n").await else {
        return;
    };
    scene.pod_with_claim("pod", gpus(1)).await;
    scene.prepared("pod").await;
    scene.daemon.install_gpus(
        "pools: [{name: gpus, count: 1, unhealthy: [{index: 0, message: too hot}]}]\n",
    );
    let is_unhealthy = || async {
        let status = scene
            .kubelet
            .ask("health", &scene.node, "pod", "")
            .await
            .expect("a status")
            .result;
        let health = &status["main"][0]["resources"][0];
        (health["health"] == "Unhealthy")
            .then(|| health["message"].as_str().unwrap_or_default().to_owned())
    };
    let message = scene.kubelet.until_health(is_unhealthy).await;
    assert!(message.contains("too hot"), "{message}");
    scene.unprepared("pod").await;
    scene.removed("pod").await;
    scene.assert_nothing_forbidden();
}

#[tokio::test]
async fn driver_report_is_in_claim_status() {
    let Some(mut scene) = Scene::start("statuses").await else {
        return;
    };
    scene.daemon.install_scripted(&Script {
        report: true,
        ..Script::default()
    });
    scene.daemon.until_serving("scripted.wasm").await;
    scene.kubelet.registered(SCRIPTED_NAME).await;
    scene
        .pod_with_claim("reported", json!([request("device", SCRIPTED_NAME, 2)]))
        .await;
    scene.prepared("reported").await;
    let reported = async |scene: &Scene| {
        let look = |claims: &[Value]| {
            let devices = claims
                .iter()
                .flat_map(|claim| claim["status"]["devices"].as_array());
            let devices: Vec<_> = devices.flatten().cloned().collect();
            if devices.len() == 2 {
                Ok(devices)
            } else {
                Err(format!("{claims:#?}"))
            }
        };
        scene
            .api
            .until(
                "both devices have a status",
                &scene.path("resourceclaims"),
                look,
            )
            .await
    };
    let devices = reported(&scene).await;
    for device in &devices {
        assert_eq!(device["driver"], SCRIPTED_NAME);
        let condition = &device["conditions"][0];
        assert_eq!(
            (&condition["type"], &condition["status"]),
            (&json!("Ready"), &json!("True"))
        );
        assert_eq!(device["data"], json!({"mtu": 9000}));
        let network = &device["networkData"];
        assert_eq!(network["ips"], json!(["192.0.2.5/24", "2001:db8::5/64"]));
        assert_eq!(network["interfaceName"], "net1");
        assert_eq!(network["hardwareAddress"], "00:00:5e:00:53:01");
    }
    scene.daemon.restart().await;
    scene.daemon.until_serving("scripted.wasm").await;
    assert_eq!(
        reported(&scene).await,
        devices,
        "a restart changes nothing, not even the times"
    );
    scene.unprepared_again("reported", SCRIPTED_NAME).await;
    scene.removed("reported").await;
    scene.assert_nothing_forbidden();
}

impl Scene {
    /// Creates a claim with parameters for its driver and a pod that uses it, both of this name, and prepares it. Gives its path.
    async fn prepared_with_parameters(&self, name: &str, is_spaced: bool) -> String {
        let opaque = json!({"driver": SCRIPTED_NAME, "parameters": {"some": {"of": [1, 2]}}});
        let devices = json!({"requests": [request("device", SCRIPTED_NAME, 1)], "config": [{"opaque": opaque}]});
        let claim = json!({"metadata": {"name": name}, "spec": {"devices": devices}});
        let path = self.path("resourceclaims");
        let created = match is_spaced {
            true => self.api.post_spaced(&path, &claim).await,
            false => self.api.post(&path, &claim).await,
        };
        created.done();
        let claims = json!([{"name": "claim", "resourceClaimName": name}]);
        let container = json!({"resources": {"claims": [{"name": "claim"}]}});
        self.api
            .post(
                &self.path("pods"),
                &pod(&self.node, name, claims, container),
            )
            .await
            .done();
        self.prepared(name).await;
        path
    }
}

/// A server compares the parameters that it stored, spaces included, with those of a write in JSON, which have none by then.
#[tokio::test]
async fn unwritable_claim_status_is_a_condition() {
    let Some(scene) = Scene::start("parameters").await else {
        return;
    };
    scene.daemon.install_scripted(&Script {
        report: true,
        ..Script::default()
    });
    scene.daemon.until_serving("scripted.wasm").await;
    scene.kubelet.registered(SCRIPTED_NAME).await;
    let claims = scene.prepared_with_parameters("plain", false).await;
    let has_status = |claims: &[Value]| match claims
        .iter()
        .any(|claim| claim["status"]["devices"].is_array())
    {
        true => Ok(()),
        false => Err(format!("{claims:#?}")),
    };
    scene
        .api
        .until("the device has a status", &claims, has_status)
        .await;
    scene.prepared_with_parameters("spaced", true).await;
    scene
        .daemon
        .until_conditions(&["claim-status-unwritable"])
        .await;
    for name in ["plain", "spaced"] {
        scene.unprepared(name).await;
        scene.removed(name).await;
    }
    scene.daemon.until_conditions(&[]).await;
    scene.assert_nothing_forbidden();
}

#[tokio::test]
async fn refusal_is_kubelet_error_and_event() {
    let Some(scene) = Scene::start("refusals").await else {
        return;
    };
    scene.daemon.install_scripted(&Script::default());
    scene.daemon.until_serving("scripted.wasm").await;
    scene.kubelet.registered(SCRIPTED_NAME).await;
    scene
        .pod_with_claim(
            "refuse-permanent",
            json!([request("device", SCRIPTED_NAME, 1)]),
        )
        .await;
    let Err(Failure::Refused(why)) = scene.prepare("refuse-permanent").await else {
        panic!("it is refused")
    };
    assert!(why.contains("the script refuses it"), "{why}");
    for kind in ["ResourceClaim", "Pod"] {
        let look = |events: &[Value]| {
            let is_on_it = |event: &&Value| {
                let about = &event["regarding"];
                let by = event["reportingController"].as_str().unwrap_or_default();
                about["kind"] == kind
                    && about["name"] == "refuse-permanent"
                    && by.contains("nodedock")
            };
            events
                .iter()
                .find(is_on_it)
                .cloned()
                .ok_or_else(|| format!("{events:#?}"))
        };
        let event = scene
            .api
            .until(
                &format!("an event is on the {kind}"),
                &scene.path("events"),
                look,
            )
            .await;
        let note = event["note"].as_str().unwrap_or_default();
        assert!(note.contains("the script refuses it"), "{event:#}");
    }
    scene.unprepared("refuse-permanent").await;
    scene.removed("refuse-permanent").await;
    scene.assert_nothing_forbidden();
}
