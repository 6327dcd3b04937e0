//! Who may hold a device beside whom.

use nodedock_tests::compose::{gpu_claim, pod, request, with_parameters};
use nodedock_tests::{Daemon, Options, assert_parts};

const SHORT_WAIT: &str = "claims: {exclusiveWaitMs: 200}\n";
const TIME_SLICING: &str = r#"{"sharing": {"strategy": "TimeSlicing"}}"#;
const EXCLUSIVE: &str = r#"{"sharing": {"strategy": "Exclusive"}}"#;

#[tokio::test]
async fn a_device_that_another_claim_holds_is_refused_and_the_holder_is_named() {
    let daemon = Daemon::with_gpus(Options::default().config(SHORT_WAIT)).await;
    daemon.prepared(request(&pod("holder"), &[&gpu_claim("first", &["gpus/gpu-0"])])).await;
    let second = request(&pod("other"), &[&gpu_claim("second", &["gpus/gpu-0"])]);
    let problem = daemon.refused_as(second.clone(), "conflict", "device-held").await;
    assert_parts(&problem.message, &["default/first", "claim-first", "default/holder"]);
    assert_eq!(problem.details["holder"], "default/first");
    assert_eq!(daemon.only_claim().await.id.unwrap().name, "first", "a refused claim leaves no record");

    daemon.unprepare(&pod("holder")).await;
    daemon.prepared(second).await;
}

#[tokio::test]
async fn a_shared_device_serves_several_claims_that_agree_on_how() {
    let daemon = Daemon::with_gpus(Options::default().config(SHORT_WAIT)).await;
    for name in ["a", "b", "c"] {
        let claim = with_parameters(gpu_claim(name, &["shared/gpu-4"]), TIME_SLICING);
        daemon.prepared(request(&pod(name), &[&claim])).await;
    }
    let shared = daemon.devices().await.into_iter().find(|device| device.name == "gpu-4").unwrap();
    assert_eq!(shared.claims.len(), 3);

    let alone = with_parameters(gpu_claim("alone", &["shared/gpu-4"]), EXCLUSIVE);
    daemon.refused_as(request(&pod("alone"), &[&alone]), "conflict", "sharing-mismatch").await;
    for name in ["a", "b", "c"] {
        daemon.unprepare(&pod(name)).await;
    }
    daemon.prepared(request(&pod("alone"), &[&alone])).await;
}

#[tokio::test]
async fn a_part_of_a_device_and_the_whole_one_exclude_each_other() {
    let daemon = Daemon::with_gpus(Options::default().config(SHORT_WAIT)).await;
    let devices = daemon.devices().await;
    let parts: Vec<_> = devices.iter().filter(|d| d.pool == "split" && d.name != "gpu-6").collect();
    let [first, second, ..] = parts.as_slice() else { panic!("{devices:?}") };
    let (first, second) = (format!("split/{}", first.name), format!("split/{}", second.name));
    daemon.prepared(request(&pod("one"), &[&gpu_claim("one", &[&first])])).await;
    daemon.prepared(request(&pod("two"), &[&gpu_claim("two", &[&second])])).await;
    let problem = daemon.refused(request(&pod("whole"), &[&gpu_claim("whole", &["split/gpu-6"])])).await;
    assert_eq!(problem.code, "device-held", "{problem:?}");
}

#[tokio::test]
async fn parameters_that_a_driver_does_not_understand_are_refused_and_leave_nothing() {
    let daemon = Daemon::with_gpus(Options::default().config(SHORT_WAIT)).await;
    for bad in [r#"{"sharing": {"strategy": "Magic"}}"#, r#"{"shring": {}}"#, "no json"] {
        let claim = with_parameters(gpu_claim("bad", &["gpus/gpu-0"]), bad);
        let problem = daemon.refused(request(&pod("bad"), &[&claim])).await;
        assert_eq!(problem.kind, "invalid", "{bad}: {problem:?}");
        assert_eq!((daemon.claims().await, daemon.cdi_files()), (vec![], vec![]), "{bad}");
    }
}
