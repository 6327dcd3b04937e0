//! Calls about claims, as a kubelet makes them and as nobody should.

use std::future::Future;

use nodedock_proto::kubelet::dra::v1::dra_plugin_client::DraPluginClient as V1;
use nodedock_proto::kubelet::dra::v1beta1::dra_plugin_client::DraPluginClient as V1beta1;
use nodedock_proto::kubelet::dra::{v1, v1beta1};
use tonic::{Code, Request, Status};

use super::*;
use nodedock_model::limit::BRIDGE_CLAIMS_MAX;

type Answers = BTreeMap<String, v1::NodePrepareResourceResponse>;

/// Claims in the namespace `default`: the UID of each is `uid-NAME`.
fn claims(names: &[&str]) -> Vec<v1::Claim> {
    names.iter().map(|name| claim(&format!("uid-{name}"), name)).collect()
}

fn claim(uid: &str, name: &str) -> v1::Claim {
    v1::Claim { namespace: "default".into(), uid: uid.into(), name: name.into() }
}

async fn client(home: &Home) -> V1<Channel> {
    V1::new(channel(&home.service(GPU)).await)
}

fn prepare(
    client: &V1<Channel>,
    claims: Vec<v1::Claim>,
) -> impl Future<Output = Result<Answers, Status>> + use<> {
    let mut client = client.clone();
    async move {
        let mut request = Request::new(v1::NodePrepareResourcesRequest { claims });
        request.set_timeout(Duration::from_secs(45));
        client.node_prepare_resources(request).await.map(|answer| answer.into_inner().into_claims())
    }
}

async fn offered() -> (Home, Running, V1<Channel>) {
    let home = Home::new();
    let _ = home.serve(GPU);
    let running = home.start();
    running.open(GPU).await;
    let client = client(&home).await;
    (home, running, client)
}

#[tokio::test]
async fn every_claim_is_answered_in_both_versions() {
    let (home, running, mut client) = offered().await;
    let names = ["one", "none", "held", "breaks"];
    let answers = soon(prepare(&client, claims(&names))).await.unwrap();
    assert_eq!(answers.len(), 4);
    let device = &answers["uid-one"].devices[0];
    assert_eq!((&device.pool_name[..], &device.device_name[..]), ("pool", "device"));
    assert_eq!(
        (&device.request_names[..], device.share_id.as_deref()),
        (&["request".into()][..], Some("share"))
    );
    assert_eq!(device.cdi_device_ids, [format!("{GPU}/claim=uid-one")]);
    assert_eq!(answers["uid-none"], v1::NodePrepareResourceResponse::default());
    assert_eq!(answers["uid-held"].error, "claim default/a holds it (device-held)");
    assert!(answers["uid-breaks"].error.ends_with("(call-broke)"), "{:?}", answers["uid-breaks"]);

    let gone = v1::NodeUnprepareResourcesRequest { claims: claims(&["one", "held"]) };
    let gone = client.node_unprepare_resources(gone).await.unwrap().into_inner().into_claims();
    assert_eq!((&gone["uid-one"].error[..], &gone["uid-held"].error), ("", &answers["uid-held"].error));
    let mut refusals = home.claims.refusals.lock().unwrap().clone();
    refusals.sort();
    assert_eq!(refusals, ["breaks call-broke", "held device-held"], "of prepares alone");

    let beta = |names: &[&str]| {
        let of = |claim: v1::Claim| v1beta1::Claim {
            namespace: claim.namespace,
            uid: claim.uid,
            name: claim.name,
        };
        claims(names).into_iter().map(of).collect::<Vec<_>>()
    };
    let mut client = V1beta1::new(channel(&home.service(GPU)).await);
    let request = v1beta1::NodePrepareResourcesRequest { claims: beta(&names) };
    let answers = client.node_prepare_resources(request).await.unwrap().into_inner().into_claims();
    assert_eq!(answers.len(), 4);
    assert_eq!(answers["uid-one"].devices[0].cdi_device_ids, [format!("{GPU}/claim=uid-one")]);
    let request = v1beta1::NodeUnprepareResourcesRequest { claims: beta(&["one"]) };
    let gone = client.node_unprepare_resources(request).await.unwrap().into_inner().into_claims();
    assert_eq!(gone["uid-one"].error, "");

    let view = running.bridge.counters().view();
    let counted: Vec<_> = view.calls.iter().map(|call| (call.code, call.seconds.count())).collect();
    assert_eq!(counted, [(Code::Ok, 1); 4]);
    assert!(view.calls.iter().all(|call| call.driver.as_str() == GPU));
    assert_eq!(
        view.operations.iter().map(|o| (o.is_error, o.seconds.count())).collect::<Vec<_>>(),
        [(true, 2), (false, 1), (true, 1)]
    );
    assert_eq!((view.calls_in_flight, view.connections_open > 0), (0, true));
}

#[tokio::test]
async fn what_is_malformed_is_answered_claim_by_claim() {
    let (_home, _running, client) = offered().await;
    let long = "x".repeat(10_000);
    let mut asked = claims(&["one", "one"]);
    asked.extend([
        claim("", "two"),
        claim("../3", "three"),
        claim(&long, &long),
        claim("uid-one-more", "UPPER"),
    ]);
    asked.push(v1::Claim { namespace: String::new(), uid: "uid-7".into(), name: "seven".into() });
    let answers = soon(prepare(&client, asked)).await.unwrap();
    assert_eq!(answers.len(), 6);
    assert_eq!((answers["uid-one"].devices.len(), &answers["uid-one"].error[..]), (1, ""));
    for uid in ["", "../3", &long, "uid-one-more", "uid-7"] {
        let error = &answers[uid].error;
        assert!(error.ends_with("(claim-name-invalid)") && error.len() < 400, "{error}");
    }
    assert_eq!(soon(prepare(&client, Vec::new())).await.unwrap(), Answers::new());
}

#[tokio::test]
async fn a_call_with_too_many_claims_is_refused_as_a_whole() {
    let (_home, running, client) = offered().await;
    let many = |count: usize| (0..count).map(|n| claim(&format!("u{n}"), "one")).collect::<Vec<_>>();
    let status = soon(prepare(&client, many(BRIDGE_CLAIMS_MAX + 1))).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    assert_eq!(soon(prepare(&client, many(BRIDGE_CLAIMS_MAX))).await.unwrap().len(), BRIDGE_CLAIMS_MAX);
    let counted: Vec<_> = running.bridge.counters().view().calls.iter().map(|call| call.code).collect();
    assert_eq!(counted, [Code::Ok, Code::ResourceExhausted]);
}

#[tokio::test]
async fn a_claim_that_takes_long_keeps_no_other_and_no_question_who_we_are() {
    let (home, _running, client) = offered().await;
    let slow = tokio::spawn(prepare(&client, claims(&["waits", "one"])));
    let mut told = [home.claims.event().await, home.claims.event().await, home.claims.event().await];
    told.sort();
    assert_eq!(told, ["done one", "prepare one", "prepare waits"]);
    assert_eq!(soon(prepare(&client, claims(&["two"]))).await.unwrap().len(), 1);
    let asked = async { registrar(&home, GPU).await.info().await.unwrap() };
    assert_eq!(soon(asked).await.name, GPU);
    assert!(!slow.is_finished());
    home.claims.go.notify_one();
    assert_eq!(soon(slow).await.unwrap().unwrap().len(), 2);
}

#[tokio::test]
async fn a_call_that_is_cancelled_is_carried_out_and_may_come_again() {
    let (home, running, client) = offered().await;
    let cancelled = tokio::spawn(prepare(&client, claims(&["waits"])));
    assert_eq!(home.claims.event().await, "prepare waits");
    cancelled.abort();
    let (again, at_once) = (prepare(&client, claims(&["waits"])), prepare(&client, claims(&["waits"])));
    let both = tokio::spawn(async move { tokio::join!(again, at_once) });
    assert_eq!(home.claims.event().await, "prepare waits");
    assert_eq!(home.claims.event().await, "prepare waits");
    let mut done = 0;
    while done < 3 {
        home.claims.go.notify_one();
        done += usize::from(home.claims.event().await == "done waits");
    }
    let (again, at_once) = soon(both).await.unwrap();
    assert_eq!((again.unwrap().len(), at_once.unwrap().len()), (1, 1));
    let cancelled = |running: &Running| {
        running.bridge.counters().view().calls.iter().any(|call| call.code == Code::Cancelled)
    };
    running.until("counted", cancelled).await;
}

#[tokio::test]
async fn a_claim_waits_for_a_driver_that_loads_and_one_that_needs_none_does_not() {
    let home = Home::new();
    home.registry.update(DriverKind::Wasm, "a.wasm", |view| view.state = DriverState::Compiled);
    let running = Running::start(BridgeParts { remembered: vec![name(GPU)], ..home.parts() });
    running.open(GPU).await;
    let client = client(&home).await;
    let waiting = tokio::spawn(prepare(&client, claims(&["calls"])));
    assert_eq!(home.claims.event().await, "prepare calls");
    assert_eq!(soon(prepare(&client, claims(&["one"]))).await.unwrap()["uid-one"].error, "");
    assert!(!waiting.is_finished());
    let _gpu = home.serve(GPU);
    assert_eq!(soon(waiting).await.unwrap().unwrap()["uid-calls"].error, "");
    assert!(home.claims.refusals.lock().unwrap().is_empty(), "it was not refused");
}

#[tokio::test]
async fn a_driver_that_comes_just_after_it_was_missed_is_asked() {
    let home = Home::new();
    home.registry.update(DriverKind::Wasm, "a.wasm", |view| view.state = DriverState::Compiled);
    let running = Running::start(BridgeParts { remembered: vec![name(GPU)], ..home.parts() });
    running.open(GPU).await;
    let client = client(&home).await;
    let asking = tokio::spawn(prepare(&client, claims(&["missed"])));
    assert_eq!(home.claims.event().await, "prepare missed");
    let _gpu = home.serve(GPU);
    home.claims.go.notify_one();
    assert_eq!(soon(asking).await.unwrap().unwrap()["uid-missed"].error, "");
}

#[tokio::test]
async fn a_driver_that_does_not_come_in_the_callers_time_is_said_for_each_claim() {
    let home = Home::new();
    home.registry.update(DriverKind::Wasm, "a.wasm", |view| view.state = DriverState::Compiled);
    let running = Running::start(BridgeParts { remembered: vec![name(GPU)], ..home.parts() });
    running.open(GPU).await;
    let mut client = client(&home).await;
    let mut request = Request::new(v1::NodePrepareResourcesRequest { claims: claims(&["calls", "one"]) });
    request.set_timeout(Duration::from_secs(2));
    let answers = client.node_prepare_resources(request).await.unwrap().into_inner().into_claims();
    assert!(answers["uid-calls"].error.ends_with("(driver-unknown)"), "{answers:?}");
    assert_eq!(answers["uid-one"].error, "");
    assert_eq!(*home.claims.refusals.lock().unwrap(), ["calls driver-unknown"]);
    // Nothing is on its way any more: nobody waits, though the caller would.
    home.registry.update(DriverKind::Wasm, "a.wasm", |view| view.state = DriverState::Failed);
    let answers = soon(prepare(&client, claims(&["calls"]))).await.unwrap();
    assert!(answers["uid-calls"].error.ends_with("(driver-unknown)"), "{answers:?}");
}

#[tokio::test]
async fn at_the_end_calls_under_way_are_answered_and_new_ones_find_no_socket() {
    let (home, running, client) = offered().await;
    let waiting = tokio::spawn(prepare(&client, claims(&["waits"])));
    assert_eq!(home.claims.event().await, "prepare waits");
    let tasks = running.tasks.clone();
    let draining = tokio::spawn(async move { tasks.drain(PATIENCE).await });
    running.until("closed", |_| !home.registration(GPU).exists() && !home.service(GPU).exists()).await;
    assert!(!draining.is_finished());
    home.claims.go.notify_one();
    assert_eq!(soon(waiting).await.unwrap().unwrap()["uid-waits"].error, "");
    assert!(soon(draining).await.unwrap());
}
