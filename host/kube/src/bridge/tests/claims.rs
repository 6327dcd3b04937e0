//! Calls about claims, as a kubelet makes them and as no client should.

use nodedock_proto::kubelet::dra::v1::dra_plugin_client::DraPluginClient as V1;
use nodedock_proto::kubelet::dra::v1beta1::dra_plugin_client::DraPluginClient as V1beta1;
use nodedock_proto::kubelet::dra::{v1, v1beta1};
use std::time::Duration;
use tonic::{Code, Request};

use super::*;
use crate::bridge::dra::service::BRIDGE_CLAIMS_MAX;
use nodedock_base::device_plugin_sockets::socket_id;

type Answers = BTreeMap<String, v1::NodePrepareResourceResponse>;

fn claims(names: &[&str]) -> Vec<v1::Claim> {
    names
        .iter()
        .map(|name| claim(&format!("uid-{name}"), name))
        .collect()
}

fn claim(uid: &str, name: &str) -> v1::Claim {
    v1::Claim {
        namespace: "default".into(),
        uid: uid.into(),
        name: name.into(),
    }
}

fn prepare(
    client: &V1<Channel>,
    claims: Vec<v1::Claim>,
) -> impl Future<Output = Result<Answers, Status>> + use<> {
    let mut client = client.clone();
    async move {
        let mut request = Request::new(v1::NodePrepareResourcesRequest { claims });
        request.set_timeout(Duration::from_secs(45));
        client
            .node_prepare_resources(request)
            .await
            .map(|answer| answer.into_inner().into_claims())
    }
}

/// A node whose driver serves, with claims `one` and `two`, and `held` for the device of the first.
async fn offered() -> (Node, Running, V1<Channel>) {
    let node = Node::new();
    for (name, device) in [("one", "a"), ("two", "b"), ("held", "a")] {
        node.source.put(name, "pool", device);
    }
    let running = node.serving().await;
    let client = V1::new(connect(&node.service(GPU)).await.unwrap());
    (node, running, client)
}

/// Returns the number of calls, or operations, with these labels in the metrics.
fn counted(running: &Running, family: &str, labels: &str) -> usize {
    let (metrics, mut registry) = (
        running.bridge.metrics(),
        prometheus_client::registry::Registry::default(),
    );
    registry.register("calls", "", metrics.calls.clone());
    registry.register("operations", "", metrics.operations.clone());
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    let start = format!("{family}_count{{");
    let lines = text
        .lines()
        .filter(|line| line.starts_with(&start) && line.contains(labels));
    lines
        .map(|line| line.rsplit(' ').next().unwrap().parse::<usize>().unwrap())
        .sum()
}

/// Returns the number of calls that ended with a code.
fn calls(running: &Running, code: Code) -> usize {
    counted(running, "calls", &format!("code=\"{code:?}\""))
}

#[tokio::test]
async fn both_api_versions_answer_every_claim() {
    let (node, running, mut client) = offered().await;
    soon(prepare(&client, claims(&["one"]))).await.unwrap();
    let names = ["one", "two", "held", "none"];
    let answers = soon(prepare(&client, claims(&names))).await.unwrap();
    assert_eq!(answers.len(), 4);
    let device = &answers["uid-one"].devices[0];
    assert_eq!(
        (&device.pool_name[..], &device.device_name[..]),
        ("node-1/pool", "a")
    );
    assert_eq!(device.request_names, ["request"]);
    assert_eq!(device.cdi_device_ids, [format!("{GPU}/claim=uid-one-a")]);
    assert_eq!(answers["uid-two"].error, "");
    let held = &answers["uid-held"].error;
    assert!(
        held.contains("default/one") && held.ends_with("(device-held)"),
        "{held}"
    );
    assert!(
        answers["uid-none"].error.ends_with("(no-such-claim)"),
        "{answers:?}"
    );
    let mut refusals = node.refusals.lock().unwrap().clone();
    refusals.sort();
    let expected = [
        "Prepare held of 1 pods: device-held",
        "Prepare none of 0 pods: no-such-claim",
    ];
    assert_eq!(refusals, expected);

    let mut beta = V1beta1::new(connect(&node.service(GPU)).await.unwrap());
    let of = |claim: v1::Claim| v1beta1::Claim {
        namespace: claim.namespace,
        uid: claim.uid,
        name: claim.name,
    };
    let in_beta: Vec<_> = claims(&names).into_iter().map(of).collect();
    let request = v1beta1::NodePrepareResourcesRequest {
        claims: in_beta.clone(),
    };
    let again = beta
        .node_prepare_resources(request)
        .await
        .unwrap()
        .into_inner()
        .into_claims();
    assert!(
        again.len() == 4 && again["uid-held"].error.ends_with("(device-held)"),
        "{again:?}"
    );
    assert_eq!(
        again["uid-one"].devices[0].cdi_device_ids,
        device.cdi_device_ids
    );
    let gone = v1::NodeUnprepareResourcesRequest {
        claims: claims(&["one", "none"]),
    };
    let gone = client
        .node_unprepare_resources(gone)
        .await
        .unwrap()
        .into_inner()
        .into_claims();
    assert_eq!(
        (&gone["uid-one"].error[..], &gone["uid-none"].error[..]),
        ("", "")
    );
    let request = v1beta1::NodeUnprepareResourcesRequest {
        claims: in_beta[1..2].to_vec(),
    };
    let gone = beta
        .node_unprepare_resources(request)
        .await
        .unwrap()
        .into_inner()
        .into_claims();
    assert_eq!(gone["uid-two"].error, "");
    assert!(node.manager.records.claims().is_empty());
    assert_eq!(running.bridge.metrics().calls_in_flight.get(), 0);
    assert_eq!(calls(&running, Code::Ok), 5);
    for (service, prepares) in [
        (v1::dra_plugin_server::SERVICE_NAME, 2),
        (v1beta1::dra_plugin_server::SERVICE_NAME, 1),
    ] {
        for (method, count) in [
            ("NodePrepareResources", prepares),
            ("NodeUnprepareResources", 1),
        ] {
            let labels = format!("driver=\"{GPU}\",method=\"/{service}/{method}\",code=\"Ok\"");
            assert_eq!(counted(&running, "calls", &labels), count, "{labels}");
        }
    }
    for (operation, is_error, count) in [
        ("PrepareResources", false, 1),
        ("PrepareResources", true, 2),
        ("UnprepareResources", false, 2),
    ] {
        let labels = format!("operation=\"{operation}\",is_error=\"{is_error}\"");
        assert_eq!(counted(&running, "operations", &labels), count, "{labels}");
    }
}

#[tokio::test]
async fn too_many_claims_fail_the_call() {
    let (_node, running, client) = offered().await;
    assert_eq!(
        soon(prepare(&client, Vec::new())).await.unwrap(),
        Answers::new()
    );
    let many = |count: usize| {
        (0..count)
            .map(|n| claim(&format!("u{n}"), "none"))
            .collect::<Vec<_>>()
    };
    let status = soon(prepare(&client, many(BRIDGE_CLAIMS_MAX + 1)))
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    let mut most = many(BRIDGE_CLAIMS_MAX);
    most[0] = claim("../3", "three");
    let answers = soon(prepare(&client, most)).await.unwrap();
    assert_eq!(answers.len(), BRIDGE_CLAIMS_MAX);
    assert!(
        answers["../3"].error.ends_with("(claim-name-invalid)"),
        "each claim is answered by itself"
    );
    assert_eq!(
        (
            calls(&running, Code::Ok),
            calls(&running, Code::ResourceExhausted)
        ),
        (1, 1)
    );
}

#[tokio::test]
async fn cancelled_slow_call_is_completed() {
    let (node, running, client) = offered().await;
    node.driver.shut.send_replace(true);
    let cancelled = tokio::spawn(prepare(&client, claims(&["one"])));
    assert_eq!(node.driver.call().await, "prepare a");
    assert_eq!(Registrar::dial(&node, GPU).await.info().await.name, GPU);
    cancelled.abort();
    let (again, at_once) = (
        prepare(&client, claims(&["one"])),
        prepare(&client, claims(&["one", "none"])),
    );
    let both = tokio::spawn(async move { tokio::join!(again, at_once) });
    running
        .until("counted", |running| calls(running, Code::Cancelled) == 1)
        .await;
    assert!(!both.is_finished());
    node.driver.shut.send_replace(false);
    let (again, at_once) = soon(both).await.unwrap();
    assert_eq!(
        (&again.unwrap()["uid-one"].error[..], at_once.unwrap().len()),
        ("", 2)
    );
    assert_eq!(
        node.driver.calls(),
        [""; 0],
        "it was prepared by the first call"
    );
}

#[tokio::test]
async fn only_unprepared_claims_wait_for_driver() {
    let (node, running, mut client) = offered().await;
    soon(prepare(&client, claims(&["two"]))).await.unwrap();
    node.retire(GPU, DriverState::Compiled);
    let waiting = tokio::spawn(prepare(&client, claims(&["one"])));
    assert_eq!(
        soon(prepare(&client, claims(&["two"]))).await.unwrap()["uid-two"].error,
        ""
    );
    let mut request = Request::new(v1::NodePrepareResourcesRequest {
        claims: claims(&["one", "two"]),
    });
    request.set_timeout(Duration::from_secs(1));
    let answers = client
        .node_prepare_resources(request)
        .await
        .unwrap()
        .into_inner()
        .into_claims();
    assert!(
        answers["uid-one"].error.ends_with("(driver-not-serving)"),
        "half of the time is over: {answers:?}"
    );
    assert_eq!(answers["uid-two"].error, "");
    assert_eq!(
        *node.refusals.lock().unwrap(),
        ["Prepare one of 1 pods: driver-not-serving"]
    );
    assert!(!waiting.is_finished());
    node.serve(GPU);
    assert_eq!(soon(waiting).await.unwrap().unwrap()["uid-one"].error, "");
    assert_eq!(node.refusals.lock().unwrap().len(), 1, "it was not refused");

    // One that failed is not waited for, though the caller would.
    node.retire(GPU, DriverState::Failed);
    node.source.put("three", "pool", "c");
    let answers = soon(prepare(&client, claims(&["three"]))).await.unwrap();
    assert!(
        answers["uid-three"].error.ends_with("(driver-not-serving)"),
        "{answers:?}"
    );
    running.drain().await;
}

#[tokio::test]
async fn prepare_waits_for_returning_driver() {
    let node = Node::new();
    for (name, device) in [("one", "a"), ("two", "b")] {
        node.source.put(name, "pool", device);
    }
    node.serve(GPU);
    let parts = node.parts();
    let times = BridgeTimes {
        gone: PATIENCE,
        ..parts.times
    };
    let running = Running::start(BridgeParts { times, ..parts });
    running.open(GPU).await;
    let mut client = V1::new(connect(&node.service(GPU)).await.unwrap());
    soon(prepare(&client, claims(&["two"]))).await.unwrap();

    node.remove(GPU);
    let waiting = tokio::spawn(prepare(&client, claims(&["one"])));
    let unprepare = v1::NodeUnprepareResourcesRequest {
        claims: claims(&["two"]),
    };
    let answers = soon(client.node_unprepare_resources(unprepare)).await;
    let answers = answers.unwrap().into_inner().into_claims();
    assert!(
        answers["uid-two"].error.ends_with("(driver-unknown)"),
        "it is retried: {answers:?}"
    );
    let mut request = Request::new(v1::NodePrepareResourcesRequest {
        claims: claims(&["one"]),
    });
    request.set_timeout(Duration::from_secs(1));
    let answers = client.node_prepare_resources(request).await.unwrap();
    let answers = answers.into_inner().into_claims();
    assert!(
        answers["uid-one"].error.ends_with("(driver-unknown)"),
        "two thirds of the time are over: {answers:?}"
    );
    assert!(!waiting.is_finished());
    node.serve(GPU);
    assert_eq!(soon(waiting).await.unwrap().unwrap()["uid-one"].error, "");
    running.drain().await;
}

#[tokio::test]
async fn blocked_unprepare_is_reported_once() {
    let (node, running, mut client) = offered().await;
    soon(prepare(&client, claims(&["one", "two"])))
        .await
        .unwrap();
    node.retire(GPU, DriverState::Failed);
    for _ in 0..3 {
        let request = v1::NodeUnprepareResourcesRequest {
            claims: claims(&["one", "none"]),
        };
        let answers = client
            .node_unprepare_resources(request)
            .await
            .unwrap()
            .into_inner()
            .into_claims();
        assert!(
            answers["uid-one"].error.ends_with("(driver-not-serving)"),
            "{answers:?}"
        );
        assert_eq!(answers["uid-none"].error, "");
    }
    assert_eq!(
        *node.refusals.lock().unwrap(),
        ["Unprepare one of 1 pods: driver-not-serving"]
    );
    running.drain().await;
}

#[tokio::test]
async fn shutdown_answers_calls_in_flight() {
    let (node, running, client) = offered().await;
    node.driver.shut.send_replace(true);
    let waiting = tokio::spawn(prepare(&client, claims(&["one"])));
    assert_eq!(node.driver.call().await, "prepare a");
    let tasks = running.tasks.clone();
    let draining = tokio::spawn(async move { tasks.drain(PATIENCE).await });
    running
        .until("closed", |_| {
            !node.registration(GPU).exists() && !node.service(GPU).exists()
        })
        .await;
    assert!(!draining.is_finished());
    node.driver.shut.send_replace(false);
    assert_eq!(soon(waiting).await.unwrap().unwrap()["uid-one"].error, "");
    assert!(soon(draining).await.unwrap());
}

#[tokio::test]
async fn calls_wait_during_handover() {
    let (node, old, client) = offered().await;
    let inodes =
        || [node.registration(GPU), node.service(GPU)].map(|path| socket_id(&path).unwrap());
    let before = inodes();
    node.driver.shut.send_replace(true);
    let under_way = tokio::spawn(prepare(&client, claims(&["one"])));
    assert_eq!(node.driver.call().await, "prepare a");
    old.bridge.hold();
    node.driver.shut.send_replace(false);
    assert!(old.bridge.claims().err().unwrap().retry_after_ms.is_some());
    let on_its_connection = tokio::spawn(prepare(&client, claims(&["one"])));
    let dialled = connect(&node.service(GPU)).await.unwrap();
    let on_a_new_one = tokio::spawn(prepare(&V1::new(dialled), claims(&["one"])));
    node.remove(GPU);
    node.serve(GPU);

    let listeners = Listeners::of_start("start2");
    listeners.adopt(old.bridge.0.parts.listeners.give().unwrap());
    let new = Running::start(BridgeParts {
        listeners,
        is_alone: false,
        ..node.parts()
    });
    for call in [under_way, on_its_connection, on_a_new_one] {
        assert_eq!(soon(call).await.unwrap().unwrap()["uid-one"].error, "");
    }
    old.drain().await;
    assert!(node.refusals.lock().unwrap().is_empty());
    assert_eq!(inodes(), before, "for the kubelet nothing has changed");
    new.drain().await;
    assert!(!node.registration(GPU).exists() && !node.service(GPU).exists());
}
