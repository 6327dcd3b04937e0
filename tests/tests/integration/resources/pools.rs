//! Pools of a WASM driver under a resource's name: a device of theirs is given by a claim, however it is requested.

use std::collections::BTreeSet;

use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_FILE, MOCK_GPU_NAME, wasm};
use nodedock_tests::{Daemon, Options};

use super::agreement::agree;
use super::{GPU, freed, ids, limited, ready, short, with_gpus};

/// A claim does not wait for a device.
const NO_WAIT: &str = "claims: {exclusiveWaitMs: 0}\n";

async fn daemon() -> Daemon {
    let daemon = Daemon::start_with(Options::default().config(NO_WAIT)).await;
    with_gpus(&daemon).await;
    daemon
}

/// Kills the daemon, and waits for its driver.
async fn crash(daemon: &mut Daemon) {
    daemon.crash().await;
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon.until_allocatable(GPU, 3).await;
}

#[tokio::test]
async fn pool_device_is_a_prepared_claim() {
    let mut daemon = daemon().await;
    let wanted = limited("one", &[(GPU, 2)]);
    let answer = ready(&daemon, wanted.clone()).await;
    assert_eq!(ids(&answer, "main", GPU), ["gpus/gpu-0", "gpus/gpu-1"]);
    assert!(
        answer.claims.is_empty(),
        "the claim is not the pod's own: {answer:#?}"
    );
    let named: BTreeSet<_> = answer.containers[0].cdi_devices.iter().cloned().collect();
    for _ in 0..2 {
        assert_eq!(BTreeSet::from_iter(daemon.only_cdi_file().devices()), named);
        let claim = daemon.only_claim().await;
        assert_eq!(
            (claim.state.as_str(), claim.drivers[0].devices.len()),
            ("prepared", 2),
            "{claim:#?}"
        );
        assert_eq!(ready(&daemon, wanted.clone()).await, answer);
        assert_eq!(
            daemon.pod_devices(&pod("one")).await.expect("it is known"),
            answer
        );
        assert_eq!(
            super::start(&daemon, "one", "main")
                .await
                .expect("it may start"),
            answer.containers[0]
        );
        assert_eq!(agree(&daemon).await.len(), 2);
        daemon.agrees().await;
        crash(&mut daemon).await;
    }
    assert_eq!(
        freed(&daemon, "one").await,
        [("main".into(), GPU.into(), "freed".into())]
    );
    assert!(agree(&daemon).await.is_empty() && daemon.agrees().await.is_empty());
    assert_eq!((daemon.cdi_files(), daemon.pods().await), (vec![], vec![]));
}

#[tokio::test]
async fn device_of_pod_is_refused_elsewhere() {
    let mut daemon = daemon().await;
    let answer = ready(&daemon, limited("holder", &[(GPU, 1)])).await;
    let [device] = ids(&answer, "main", GPU).try_into().expect("one device");
    let claiming = request(&pod("other"), &[&gpu_claim("own", &[&device])]);
    for _ in 0..2 {
        let problem = daemon
            .refused_as(claiming.clone(), "conflict", "device-held")
            .await;
        assert!(problem.message.contains("default/holder"), "{problem:?}");
        assert_eq!(agree(&daemon).await.len(), 1);
        crash(&mut daemon).await;
    }
    freed(&daemon, "holder").await;
    daemon.prepared(claiming).await;
}

#[tokio::test]
async fn devices_stay_while_driver_is_missing() {
    let mut daemon = daemon().await;
    ready(&daemon, limited("one", &[(GPU, 2)])).await;
    daemon.take_out(MOCK_GPU_FILE);
    daemon.until_gone(MOCK_GPU_FILE).await;
    let left = daemon.unprepare_pod(&pod("one")).await;
    let [resource] = left.resources.as_slice() else {
        panic!("{left:#?}")
    };
    let problem = resource.problem.clone().expect("a refusal has a problem");
    assert_eq!(resource.outcome, "refused");
    assert!(problem.message.contains(MOCK_GPU_NAME), "{problem:?}");
    for _ in 0..2 {
        daemon
            .until_resource(GPU, |gpu| (gpu.allocatable, gpu.allocated) == (0, 2))
            .await;
        assert_eq!(agree(&daemon).await.len(), 2, "the pod has them still");
        assert_eq!(daemon.only_claim().await.state, "unpreparing");
        let refused = short(&daemon, limited("two", &[(GPU, 3)])).await;
        assert!(refused.message.contains(GPU), "{refused:?}");
        daemon.crash().await;
    }
    daemon.drop_in(MOCK_GPU_FILE, wasm(MOCK_GPU, Form::Core));
    daemon
        .until_claims("nothing is held any more", <[_]>::is_empty)
        .await;
    daemon.until_allocatable(GPU, 3).await;
    assert!(agree(&daemon).await.is_empty());
    ready(&daemon, limited("two", &[(GPU, 3)])).await;
}

#[tokio::test]
async fn racing_pods_never_share_pool_devices() {
    let daemon = daemon().await;
    for round in 0..8 {
        let name = |who: &str| format!("{who}-{round}");
        let claim = |n: usize| {
            let name = name(&format!("claim{n}"));
            request(
                &pod(&name),
                &[&gpu_claim(&name, &[&format!("gpus/gpu-{n}")])],
            )
        };
        let limit = |n: usize| limited(&name(&format!("limit{n}")), &[(GPU, 1)]);
        let requests = (0..3).flat_map(|n| [claim(n), limit(n)]);
        let asked = requests.map(|request| {
            let mut client = daemon.client();
            async move {
                client
                    .prepare_pod(request)
                    .await
                    .expect("an answer")
                    .into_inner()
            }
        });
        let answers = futures::future::join_all(asked).await;
        let won = answers
            .iter()
            .filter(|answer| !answer.containers.is_empty())
            .count();
        assert!((1..=3).contains(&won), "three devices: {answers:#?}");
        daemon.agrees().await;
        let devices: Vec<_> = daemon
            .claims()
            .await
            .into_iter()
            .flat_map(|c| c.drivers)
            .collect();
        let devices: Vec<_> = devices
            .into_iter()
            .flat_map(|driver| driver.devices)
            .collect();
        assert_eq!(
            BTreeSet::from_iter(&devices).len(),
            devices.len(),
            "{devices:?}"
        );
        for pod in daemon.pods().await {
            daemon.unprepare(&pod.pod.expect("a pod has a name")).await;
        }
        assert!(agree(&daemon).await.is_empty());
    }
}

#[tokio::test]
async fn force_release_frees_devices_without_driver() {
    let mut daemon = daemon().await;
    ready(&daemon, limited("one", &[(GPU, 3)])).await;
    let claim = daemon
        .only_claim()
        .await
        .id
        .expect("a claim has a name")
        .name;
    let release = ["release", "claim", &claim, "--yes"];
    assert!(
        daemon.cli(&release).await.failed(1).contains("default/one"),
        "its pod has it"
    );
    daemon.take_out(MOCK_GPU_FILE);
    daemon.until_gone(MOCK_GPU_FILE).await;
    daemon
        .until_resource(GPU, |resource| !resource.active)
        .await;
    freed(&daemon, "one").await;
    assert_eq!(agree(&daemon).await.len(), 3);
    daemon.cli(&release).await.done();
    assert!(agree(&daemon).await.is_empty() && daemon.agrees().await.is_empty());
    daemon.crash().await;
    assert!(agree(&daemon).await.is_empty() && daemon.pods().await.is_empty());
    daemon.drop_in(MOCK_GPU_FILE, wasm(MOCK_GPU, Form::Core));
    daemon.until_allocatable(GPU, 3).await;
    ready(&daemon, limited("two", &[(GPU, 3)])).await;
}
