//! Tests of parameters that a driver refuses before it is called to prepare a claim.

use crate::manager::claims::ClaimEnd;
use crate::manager::claims::fixtures::{claim, driver, permanent, pod, transient};
use crate::manager::tests::scene::{Daemon, FakeDriver, Home, ends, with_gpu, with_two_drivers};
use nodedock_model::{Claim, ConfigSource, OpaqueConfig};

fn with_parameters(mut claim: Claim, of: &str, parameters: &str) -> Claim {
    let config = OpaqueConfig {
        source: ConfigSource::Claim,
        requests: Vec::new(),
        driver: driver(of),
        parameters: parameters.to_owned(),
    };
    let allocation = claim.allocation.as_mut().unwrap();
    allocation.configs.push(config);
    claim
}

fn records(daemon: &Daemon) -> usize {
    daemon.manager.records.claims().len()
}

#[tokio::test]
async fn refused_parameters_call_no_driver() {
    let (_home, daemon, a, gpu, nic) = with_two_drivers();
    gpu.refuse_parameters("bad", permanent());
    let both = claim("both", &["gpu/0", "nic/0"], &[&a]);
    daemon
        .source
        .put(with_parameters(both.clone(), "gpu", "bad"));
    let commits = daemon.commits();
    let outcome = daemon.prepare(&a, &["both"]).await;
    assert_eq!(ends(&outcome), ["bad-parameters"]);
    let problem = outcome.claims[0].end.as_ref().unwrap_err();
    assert!(
        problem
            .message
            .starts_with("parameters of the claim for driver"),
        "{problem}"
    );
    assert_eq!((gpu.counts(), nic.counts()), ((0, 0), (0, 0)));
    assert_eq!((daemon.commits(), records(&daemon)), (commits, 0));
    let refused = daemon.manager.retries.refused_claims();
    assert_eq!(refused[0].claim, both.id);

    // Its devices are free for another claim.
    daemon.source.put(claim("two", &["gpu/0", "nic/0"], &[&a]));
    assert_eq!(ends(&daemon.prepare(&a, &["two"]).await), ["prepared"]);
}

#[tokio::test]
async fn other_claims_of_request_are_prepared() {
    let (_home, daemon, a, gpu) = with_gpu();
    gpu.refuse_parameters("bad", permanent());
    for (name, device, parameters) in [("one", "gpu/0", "bad"), ("two", "gpu/1", "good")] {
        let claim = claim(name, &[device], &[&a]);
        daemon.source.put(with_parameters(claim, "gpu", parameters));
    }
    let outcome = daemon.prepare(&a, &["one", "two"]).await;
    assert_eq!(ends(&outcome), ["bad-parameters", "prepared"]);
    assert_eq!((gpu.counts(), records(&daemon)), ((1, 0), 1));
}

/// An update of the driver has another schema: what is prepared is answered as it was, and unprepared.
#[tokio::test]
async fn prepared_claim_survives_another_schema() {
    let (_home, daemon, a, gpu) = with_gpu();
    let one = claim("one", &["gpu/0"], &[&a]);
    daemon.source.put(with_parameters(one, "gpu", "old"));
    assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["prepared"]);
    let newer = FakeDriver::new(driver("gpu"));
    newer.refuse_parameters("old", permanent());
    daemon.serve(&newer);
    assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["prepared"]);
    assert_eq!(daemon.unprepare(&a).await, [Ok(ClaimEnd::Unprepared)]);
    assert_eq!((gpu.counts(), newer.counts()), ((1, 0), (0, 1)));
}

/// The driver could not say: the claim is as before, and may be prepared later.
#[tokio::test(start_paused = true)]
async fn failed_check_is_retried() {
    let (home, a, gpu) = (Home::new(), pod("a"), FakeDriver::new(driver("gpu")));
    let daemon = home.start();
    daemon.serve(&gpu);
    gpu.refuse_parameters("any", transient());
    let one = claim("one", &["gpu/0"], &[&a]);
    daemon.source.put(with_parameters(one, "gpu", "any"));
    assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["device-busy"]);
    assert_eq!((gpu.counts(), records(&daemon)), ((0, 0), 0));
    gpu.refuse_parameters("none", transient());
    assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["prepared"]);
}
