//! A daemon that is asked to end answers what it took on, leaves a socket that can be replaced, and ends with 0.

use nodedock_proto::node::v1;
use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::{Daemon, Options};
use rustix::process::Signal;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::with_gpus;

#[tokio::test]
async fn service_manager_is_notified_of_state() {
    for signal in [Signal::TERM, Signal::INT] {
        // The harness itself waits for READY=1 before it returns.
        let mut daemon = Daemon::start().await;
        daemon.signal(signal);
        assert_eq!(daemon.notification().await, "STOPPING=1");
        assert_eq!(daemon.ended().await.code(), Some(0), "{signal:?}");
        daemon.cli(&["get", "drivers"]).await.failed(3);
        daemon.run().await;
    }
}

#[tokio::test]
async fn waiting_prepare_is_answered_before_exit() {
    let options = Options::default()
        .config("claims: {exclusiveWaitMs: 60000}\n")
        .env("NODEDOCK_LOG", "debug");
    let mut daemon = Daemon::with_gpus(options).await;
    daemon
        .prepared(request(
            &pod("holder"),
            &[&gpu_claim("first", &["gpus/gpu-0"])],
        ))
        .await;
    let mut second = tonic::Request::new(request(
        &pod("other"),
        &[&gpu_claim("second", &["gpus/gpu-0"])],
    ));
    second
        .metadata_mut()
        .insert("x-request-id", "the-one-that-waits".parse().unwrap());
    let mut client = daemon.client();
    let waiting = tokio::spawn(async move { client.prepare_pod(second).await });
    daemon.until_log("the-one-that-waits").await;

    assert_eq!(daemon.terminate().await.code(), Some(0));
    let answer = waiting.await.unwrap().unwrap().into_inner();
    assert_eq!(
        answer.claims[0].problem.as_ref().unwrap().code,
        "device-held",
        "{answer:?}"
    );
    assert!(
        !daemon.log().contains("did not end in time"),
        "it stops waiting at once:\n{}",
        daemon.log()
    );
    daemon.run().await;
    assert_eq!(daemon.only_claim().await.id.unwrap().name, "first");
}

#[tokio::test]
async fn open_watches_do_not_delay_exit() {
    let mut daemon = with_gpus().await;
    let mut events = daemon
        .client()
        .watch(v1::WatchRequest {})
        .await
        .unwrap()
        .into_inner();
    let mut health = Vec::new();
    for service in ["", "nodedock.node.v1.Node"] {
        let request = HealthCheckRequest {
            service: service.to_owned(),
        };
        health.push(
            HealthClient::new(daemon.channel())
                .watch(request)
                .await
                .unwrap()
                .into_inner(),
        );
    }
    daemon
        .prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
    let mut states = Vec::new();
    while states.last().is_none_or(|state| state != "prepared") {
        let event = events.message().await.unwrap().unwrap();
        // The driver's own events may come in between.
        if event.kind == "claim" {
            assert_eq!(event.name, "default/a");
            states.push(event.state);
        }
    }
    assert_eq!(states, ["preparing", "prepared"]);
    assert_eq!(daemon.terminate().await.code(), Some(0));
    assert!(
        !daemon.log().contains("did not end in time"),
        "{}",
        daemon.log()
    );
    while let Ok(Some(_)) = events.message().await {}
}
