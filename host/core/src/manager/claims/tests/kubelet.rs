//! A kubelet that prepares and unprepares claims driver by driver, and goes away in the middle of it.

use std::sync::Arc;
use std::time::Duration;

use crate::manager::claims::ClaimEnd;
use crate::manager::claims::fixtures::{claim, driver, permanent, pod, transient, uid};
use crate::manager::tests::scene::{Daemon, FakeDriver, Home, Reply, ends};
use crate::records::statuses;
use nodedock_model::{
    BindingConditions, Claim, ClaimRecord, ClaimState, ClaimStatuses, Condition, DeviceStatus,
    KubeletDevice, Problem,
};

const PREPARED: Option<ClaimState> = Some(ClaimState::Prepared);

fn home() -> (Home, Arc<FakeDriver>, Arc<FakeDriver>) {
    (
        Home::new(),
        FakeDriver::new(driver("gpu")),
        FakeDriver::new(driver("nic")),
    )
}

/// A daemon with drivers, and claims in its source.
fn start(home: &Home, drivers: &[&Arc<FakeDriver>], claims: &[&Claim]) -> Daemon {
    start_in("boot-1", home, drivers, claims)
}

fn start_in(boot: &str, home: &Home, drivers: &[&Arc<FakeDriver>], claims: &[&Claim]) -> Daemon {
    let daemon = home.start_with(boot, Duration::ZERO);
    drivers.iter().for_each(|driver| daemon.serve(driver));
    claims
        .iter()
        .for_each(|claim| daemon.source.put((*claim).clone()));
    daemon
}

/// Statuses that are published, by UID of the claim.
fn device_statuses(daemon: &Daemon) -> Vec<ClaimStatuses> {
    let changes = daemon.manager.records.changes_since(None);
    let records = changes.claims.into_iter().filter_map(|(_, record)| record);
    records.filter_map(|record| statuses(&record)).collect()
}

/// The drivers `gpu` and `nic`, and a claim `both` of a device of each.
struct Both {
    home: Home,
    daemon: Daemon,
    gpu: Arc<FakeDriver>,
    nic: Arc<FakeDriver>,
    both: Claim,
}

impl Both {
    fn start() -> Self {
        let (home, gpu, nic) = home();
        let both = claim("both", &["gpu/0", "nic/0"], &[&pod("a")]);
        let daemon = start(&home, &[&gpu, &nic], &[&both]);
        Self {
            home,
            daemon,
            gpu,
            nic,
            both,
        }
    }

    /// The same with both parts prepared.
    async fn prepared() -> Self {
        let scene = Self::start();
        for name in [&scene.gpu.name, &scene.nic.name] {
            scene
                .daemon
                .kubelet_prepare(name, &scene.both)
                .await
                .unwrap();
        }
        scene
    }
}

/// The driver `gpu`, and a claim `one` of its device.
fn one() -> (Home, Daemon, Arc<FakeDriver>, Claim) {
    let (home, gpu, _) = home();
    let one = claim("one", &["gpu/0"], &[&pod("a")]);
    let daemon = start(&home, &[&gpu], &[&one]);
    (home, daemon, gpu, one)
}

fn cdi(devices: &[KubeletDevice]) -> Vec<&str> {
    devices
        .iter()
        .flat_map(|device| &device.cdi)
        .map(String::as_str)
        .collect()
}

fn code<T>(outcome: Result<T, Problem>) -> String {
    outcome.map_or_else(|problem| problem.code, |_| "done".to_owned())
}

/// Drivers of the claims that the kubelet holds.
fn held(daemon: &Daemon) -> Vec<(String, Vec<String>)> {
    let names = |claim: nodedock_model::KubeletClaim| {
        (
            claim.claim.uid.to_string(),
            claim.drivers.iter().map(ToString::to_string).collect(),
        )
    };
    daemon
        .manager
        .kubelet
        .held()
        .into_iter()
        .map(names)
        .collect()
}

#[tokio::test]
async fn drivers_of_claim_are_called_separately() {
    let ((home, gpu, nic), a) = (home(), pod("a"));
    let both = claim("both", &["gpu/0", "gpu/1#share", "nic/0", "other/0"], &[&a]);
    let daemon = start(&home, &[&gpu, &nic], &[&both]);
    let first = daemon.kubelet_prepare(&gpu.name, &both).await.unwrap();
    assert_eq!(
        cdi(&first),
        [
            "gpu.example.com/claim=uid-both-0",
            "gpu.example.com/claim=uid-both-1"
        ]
    );
    assert_eq!(first[1].share_id.as_deref(), Some("share"));
    assert_eq!(first[0].requests, ["0"]);
    assert_eq!(
        (gpu.counts(), nic.counts(), daemon.cdi_files().len()),
        ((1, 0), (0, 0), 1)
    );
    daemon.kubelet_prepare(&nic.name, &both).await.unwrap();
    assert_eq!(
        daemon.state("uid-both"),
        PREPARED,
        "whose driver the third is is not ours to know"
    );
    assert_eq!(
        (gpu.counts(), nic.counts(), daemon.cdi_files().len()),
        ((1, 0), (1, 0), 2)
    );
    assert_eq!(held(&daemon).len(), 1);
    let known = &daemon.manager.kubelet.held()[0];
    assert_eq!(
        (known.consumers.as_slice(), known.drivers.len()),
        (both.reserved_for.as_slice(), 2)
    );

    assert_eq!(daemon.kubelet_unprepare(&gpu.name, &both).await, Ok(()));
    assert_eq!((gpu.counts(), nic.counts()), ((1, 1), (1, 0)));
    assert_eq!(gpu.calls().unprepare[0][0].memo, b"call 1");
    let files = daemon.cdi_files();
    assert!(
        files.len() == 1 && files[0].ends_with("nic.example.com_uid-both.yaml"),
        "{files:?}"
    );
    daemon.stop().await;

    let daemon = start(&home, &[&gpu, &nic], &[&both]);
    daemon.sweep().await;
    assert_eq!(
        held(&daemon),
        [("uid-both".to_owned(), vec!["nic.example.com".to_owned()])]
    );
    assert_eq!(
        daemon
            .kubelet_prepare(&nic.name, &both)
            .await
            .unwrap()
            .len(),
        1
    );
    assert_eq!(nic.counts(), (1, 0), "it is known");
    assert_eq!(
        daemon.kubelet_unprepare(&gpu.name, &both).await,
        Ok(()),
        "what is gone is done"
    );
    assert_eq!(daemon.kubelet_unprepare(&nic.name, &both).await, Ok(()));
    assert!(
        daemon.manager.records.claims().is_empty()
            && daemon.cdi_files().is_empty()
            && held(&daemon).is_empty()
    );
    assert_eq!((gpu.counts(), nic.counts()), ((1, 1), (1, 1)));
}

#[tokio::test]
async fn invalid_claim_is_refused_without_writes() {
    let ((home, gpu, _), a) = (home(), pod("a"));
    let good = claim("one", &["gpu/0"], &[&a]);
    let with = |change: fn(&mut Claim)| {
        let mut claim = good.clone();
        change(&mut claim);
        claim
    };
    let elsewhere = with(|c| c.allocation.as_mut().unwrap().node_name = Some("node-2".to_owned()));
    let many = with(|c| c.reserved_for = vec![c.reserved_for[0].clone(); 257]);
    for (expected, claim) in [
        ("claim-replaced", claim("one@uid-newer", &["gpu/0"], &[&a])),
        ("claim-not-allocated", with(|c| c.allocation = None)),
        ("claim-on-another-node", elsewhere),
        (
            "claim-of-another-pod",
            with(|c| c.owner_pod = Some(uid("uid-b"))),
        ),
        ("claim-too-large", many),
    ] {
        let daemon = start(&home, &[&gpu], &[&claim]);
        let before = daemon.commits();
        assert_eq!(
            code(daemon.kubelet_prepare(&gpu.name, &good).await),
            expected
        );
        assert_eq!((daemon.commits(), gpu.counts()), (before, (0, 0)));
        daemon.stop().await;
    }
    let daemon = start(&home, &[&gpu], &[]);
    assert_eq!(
        code(daemon.kubelet_prepare(&gpu.name, &good).await),
        "no-such-claim"
    );
    daemon.source.put(good.clone());
    assert_eq!(
        code(daemon.kubelet_prepare(&driver("nic"), &good).await),
        "done"
    );
    assert!(
        daemon.manager.records.claims().is_empty(),
        "without a device of the driver there is nothing to do"
    );
    let absent = claim("absent", &["nic/0"], &[&a]);
    daemon.source.put(absent.clone());
    assert_eq!(
        code(daemon.kubelet_prepare(&driver("nic"), &absent).await),
        "driver-unknown"
    );
    assert!(daemon.manager.records.claims().is_empty());
}

#[tokio::test]
async fn known_claim_is_answered_without_source() {
    let ((home, gpu, nic), a) = (home(), pod("a"));
    let both = claim("both", &["gpu/0", "nic/0"], &[&a]);
    let (other, alone) = (
        claim("other", &["gpu/1"], &[&a]),
        claim("alone", &["gpu/2"], &[&a]),
    );
    let daemon = start(&home, &[&gpu, &nic], &[&both, &other, &alone]);
    let first = daemon.kubelet_prepare(&gpu.name, &both).await;
    assert_eq!(
        code(daemon.kubelet_prepare(&gpu.name, &alone).await),
        "done"
    );
    assert_eq!(
        daemon.kubelet_prepare(&nic.name, &alone).await,
        Ok(Vec::new())
    );
    daemon
        .source
        .fail(Some(Problem::unavailable("api-away", "no route")));
    let commits = daemon.commits();
    assert_eq!(daemon.kubelet_prepare(&gpu.name, &both).await, first);
    assert_eq!((gpu.counts(), daemon.commits()), ((2, 0), commits));
    assert_eq!(
        code(daemon.kubelet_prepare(&gpu.name, &other).await),
        "api-away",
        "it has no record"
    );
    let of_nic = daemon.kubelet_prepare(&nic.name, &alone).await;
    assert_eq!(
        code(of_nic),
        "api-away",
        "a record does not say that a driver has no device of the claim"
    );
    assert_eq!(
        code(daemon.kubelet_prepare(&nic.name, &both).await),
        "done",
        "an allocation is final"
    );
    daemon.source.fail(None);
    daemon.source.remove(&both);
    assert_eq!(
        code(daemon.kubelet_prepare(&gpu.name, &both).await),
        "no-such-claim"
    );
    daemon
        .source
        .put(claim("both@uid-newer", &["gpu/0"], &[&a]));
    assert_eq!(
        code(daemon.kubelet_prepare(&gpu.name, &both).await),
        "claim-replaced"
    );
    daemon.stop().await;

    let daemon = start_in("boot-2", &home, &[&gpu, &nic], &[]);
    daemon
        .source
        .fail(Some(Problem::unavailable("api-away", "no route")));
    assert_eq!(code(daemon.kubelet_prepare(&gpu.name, &both).await), "done");
    assert_eq!(
        gpu.counts(),
        (3, 0),
        "after a boot its driver is called again"
    );
    for (name, claim) in [(&gpu.name, &both), (&nic.name, &both), (&gpu.name, &alone)] {
        assert_eq!(
            daemon.kubelet_unprepare(name, claim).await,
            Ok(()),
            "which needs no source"
        );
    }
    assert!(daemon.manager.records.claims().is_empty());
}

#[tokio::test(start_paused = true)]
async fn waiting_for_source_is_bounded() {
    let (_home, daemon, gpu, one) = one();
    daemon.source.shut(true);
    assert_eq!(
        code(daemon.kubelet_prepare(&gpu.name, &one).await),
        "claim-not-read"
    );
    assert_eq!(daemon.kubelet_unprepare(&gpu.name, &one).await, Ok(()));
}

#[tokio::test]
async fn part_of_gone_driver_is_kept() {
    for by_itself in [true, false] {
        let Both {
            home: _home,
            daemon,
            gpu,
            nic,
            both,
        } = Both::prepared().await;
        daemon.retire(&gpu);
        let problem = daemon
            .kubelet_unprepare(&gpu.name, &both)
            .await
            .unwrap_err();
        assert!(
            !problem.kind.is_permanent()
                && problem.message.contains("kept until its driver is back")
        );
        assert_eq!(
            held(&daemon),
            [("uid-both".to_owned(), vec!["nic.example.com".to_owned()])]
        );
        assert_eq!(daemon.state("uid-both"), PREPARED, "the nic stands");
        assert_eq!(
            code(daemon.kubelet_prepare(&gpu.name, &both).await),
            "claim-unpreparing"
        );
        assert_eq!(
            ends(&daemon.prepare(&pod("a"), &["both"]).await),
            ["claim-unpreparing"],
            "a pod needs all"
        );
        assert_eq!(code(daemon.kubelet_prepare(&nic.name, &both).await), "done");
        assert_eq!(
            daemon.kubelet_unprepare(&nic.name, &both).await,
            Ok(()),
            "the answer is about its own part"
        );
        assert_eq!(daemon.state("uid-both"), Some(ClaimState::Unpreparing));
        assert!(daemon.kubelet_unprepare(&gpu.name, &both).await.is_err());
        if by_itself {
            daemon.starts.unprepares();
        }
        daemon.serve(&gpu);
        if !by_itself {
            assert_eq!(daemon.kubelet_unprepare(&gpu.name, &both).await, Ok(()));
        }
        daemon.gone("uid-both").await;
        assert_eq!((gpu.counts(), nic.counts()), ((1, 1), (1, 1)));
        assert!(daemon.cdi_files().is_empty());
    }
}

/// Only the part is retried: the rest of the claim stays prepared.
#[tokio::test(start_paused = true)]
async fn part_is_retried_without_the_rest() {
    let Both {
        home: _home,
        daemon,
        gpu,
        nic,
        both,
    } = Both::prepared().await;
    daemon.starts.unprepares();
    (0..3).for_each(|_| gpu.refuse_unprepare(transient()));
    assert_eq!(
        daemon.kubelet_unprepare(&gpu.name, &both).await,
        Err(transient())
    );
    let mut changes = daemon.changes.listen();
    while daemon.manager.records.claims()[0].is_leaving() {
        changes.recv().await.unwrap();
    }
    assert_eq!((gpu.counts(), nic.counts()), ((1, 4), (1, 0)));
    assert_eq!(
        (daemon.state("uid-both"), daemon.cdi_files().len()),
        (PREPARED, 1)
    );
    assert_eq!(
        code(daemon.kubelet_prepare(&gpu.name, &both).await),
        "done",
        "it may be prepared again"
    );
}

#[tokio::test]
async fn pod_and_kubelet_share_a_claim() {
    let (
        Both {
            home: _home,
            daemon,
            gpu,
            nic,
            both,
        },
        a,
    ) = (Both::start(), pod("a"));
    daemon.kubelet_prepare(&gpu.name, &both).await.unwrap();
    assert_eq!(ends(&daemon.prepare(&a, &["both"]).await), ["prepared"]);
    assert_eq!(
        (gpu.counts(), nic.counts()),
        ((1, 0), (1, 0)),
        "the pod asked for what was missing"
    );
    assert_eq!(daemon.unprepare(&a).await, [Ok(ClaimEnd::Unprepared)]);
    assert_eq!(
        (gpu.counts(), nic.counts()),
        ((1, 0), (1, 1)),
        "the kubelet has the gpu still"
    );
    assert_eq!(
        (daemon.manager.pods.count(), daemon.cdi_files().len()),
        (1, 1),
        "for the kubelet"
    );

    assert_eq!(ends(&daemon.prepare(&a, &["both"]).await), ["prepared"]);
    assert_eq!(daemon.kubelet_unprepare(&gpu.name, &both).await, Ok(()));
    assert!(held(&daemon).is_empty());
    assert_eq!(gpu.counts(), (1, 0), "the pod has it still");
    assert_eq!(daemon.unprepare(&a).await, [Ok(ClaimEnd::Unprepared)]);
    assert_eq!((gpu.counts(), nic.counts()), ((1, 1), (2, 2)));
    assert!(daemon.manager.records.claims().is_empty() && daemon.cdi_files().is_empty());
}

#[tokio::test]
async fn next_claim_waits_for_the_device() {
    let ((home, gpu, _), a) = (home(), pod("a"));
    let (one, two) = (
        claim("one", &["gpu/0"], &[&a]),
        claim("two", &["gpu/0"], &[&a]),
    );
    let monitor = claim("monitor", &["!gpu/0"], &[&a]);
    {
        let daemon = start(&home, &[&gpu], &[&one, &two, &monitor]);
        daemon.kubelet_prepare(&gpu.name, &one).await.unwrap();
        let problem = daemon.kubelet_prepare(&gpu.name, &two).await.unwrap_err();
        assert_eq!(problem.code, "device-held");
        assert!(problem.message.contains("the kubelet for a"), "{problem}");
        assert_eq!(
            code(daemon.kubelet_prepare(&gpu.name, &monitor).await),
            "done"
        );
        daemon.stop().await;
    }
    let daemon = home.start();
    daemon.serve(&gpu);
    [&one, &two]
        .into_iter()
        .for_each(|claim| daemon.source.put(claim.clone()));
    let leave = async {
        daemon.source.asked(1).await;
        daemon.kubelet_unprepare(&gpu.name, &one).await
    };
    let (taken, left) = tokio::join!(daemon.kubelet_prepare(&gpu.name, &two), leave);
    assert_eq!((code(taken), left), ("done".to_owned(), Ok(())));
    assert_eq!(held(&daemon).len(), 2);
}

/// The kubelet cancels its calls, and its next call may come before the first has ended.
#[tokio::test]
async fn cancelled_prepare_is_still_finished() {
    for unprepare in [true, false] {
        let (_home, daemon, gpu, one) = one();
        // The claim is not even read yet.
        daemon.source.shut(true);
        tokio::select! {
            _ = daemon.kubelet_prepare(&gpu.name, &one) => panic!("the source does not answer yet"),
            () = daemon.source.asked(1) => {}
        }
        let open = async {
            tokio::task::yield_now().await;
            daemon.source.shut(false);
        };
        if unprepare {
            let (left, ()) = tokio::join!(daemon.kubelet_unprepare(&gpu.name, &one), open);
            assert_eq!(
                (left, gpu.counts()),
                (Ok(()), (1, 1)),
                "it waits for what was begun"
            );
            assert!(daemon.manager.records.claims().is_empty() && daemon.cdi_files().is_empty());
        } else {
            let (again, ()) = tokio::join!(daemon.kubelet_prepare(&gpu.name, &one), open);
            assert_eq!((code(again).as_str(), gpu.counts()), ("done", (1, 0)));
        }
    }
}

#[tokio::test]
async fn reboot_causes_one_driver_call() {
    let ((home, gpu, _), a) = (home(), pod("a"));
    let one = claim("one", &["gpu/0"], &[&a]);
    for (boot, calls) in [("boot-1", 1), ("boot-1", 1), ("boot-2", 2), ("boot-2", 2)] {
        let daemon = start_in(boot, &home, &[&gpu], &[&one]);
        let since_earlier = || {
            let kubelet = &daemon.manager.kubelet;
            kubelet.held_since_earlier_boot(&gpu.name).len()
        };
        let is_first = usize::from(gpu.counts() == (1, 0) && boot == "boot-2");
        assert_eq!(since_earlier(), is_first, "in {boot}");
        assert_eq!(code(daemon.kubelet_prepare(&gpu.name, &one).await), "done");
        assert_eq!(gpu.counts(), (calls, 0), "in {boot}");
        assert_eq!(since_earlier(), 0, "in {boot}");
        daemon.stop().await;
    }
    let daemon = start_in("boot-3", &home, &[&gpu], &[]);
    daemon.kubelet_unprepare(&gpu.name, &one).await.unwrap();
    let live = gpu.calls().unprepare.remove(0).remove(0);
    assert_eq!(
        (live.memo.as_slice(), live.boot_id.as_str()),
        (b"call 2".as_slice(), "boot-2")
    );
}

#[tokio::test]
async fn finally_refused_part_is_rolled_back() {
    let Both {
        home: _home,
        daemon,
        gpu,
        nic,
        both,
    } = Both::start();
    daemon.kubelet_prepare(&gpu.name, &both).await.unwrap();
    nic.reply("uid-both", Reply::Refuse(permanent()));
    assert_eq!(
        daemon.kubelet_prepare(&nic.name, &both).await,
        Err(permanent())
    );
    assert_eq!((nic.counts(), gpu.counts()), ((1, 1), (1, 0)));
    assert_eq!(
        held(&daemon),
        [("uid-both".to_owned(), vec!["gpu.example.com".to_owned()])]
    );
    assert_eq!(
        daemon.kubelet_prepare(&nic.name, &both).await,
        Err(permanent()),
        "by heart"
    );
    assert_eq!(nic.counts(), (1, 1));
    assert_eq!(daemon.kubelet_unprepare(&nic.name, &both).await, Ok(()));
    assert_eq!(
        code(daemon.kubelet_prepare(&nic.name, &both).await),
        "done",
        "a new request calls the driver again"
    );
}

#[tokio::test]
async fn claim_of_deleted_pods_is_unprepared() {
    let Both {
        home: _home,
        daemon,
        gpu,
        nic,
        both,
    } = Both::prepared().await;
    nic.refuse_unprepare(transient());
    let seen = daemon.manager.kubelet.held_claim(&both.id.uid).unwrap();
    // The kubelet requests the claim again, with the same consumers, before it is unprepared.
    daemon.kubelet_prepare(&gpu.name, &both).await.unwrap();
    let refused = daemon
        .manager
        .kubelet
        .unprepare_all(&seen, "its pods are gone")
        .await;
    assert_eq!(
        refused.as_ref().map_err(|problem| problem.code.as_str()),
        Err("claim-in-use")
    );
    assert!(refused.unwrap_err().message.contains("default/both"));
    assert_eq!(
        (daemon.state("uid-both"), nic.counts()),
        (Some(ClaimState::Prepared), (1, 0))
    );
    let seen = daemon.manager.kubelet.held_claim(&both.id.uid).unwrap();
    let unprepare = || {
        daemon
            .manager
            .kubelet
            .unprepare_all(&seen, "its pods are gone")
    };
    assert_eq!(unprepare().await, Err(transient()));
    let record = daemon.manager.records.claims().remove(0);
    assert!(
        record
            .timeline
            .iter()
            .any(|entry| entry.cause.starts_with("its pods are gone")),
        "{record:?}"
    );
    assert_eq!(
        (held(&daemon), daemon.state("uid-both")),
        (vec![], Some(ClaimState::Unpreparing))
    );
    assert_eq!(unprepare().await, Ok(()), "which goes on by itself");
    daemon.serve(&nic);
    daemon.starts.unprepares();
    daemon.gone("uid-both").await;
    assert_eq!((gpu.counts(), nic.counts()), ((1, 1), (1, 2)));
    assert_eq!(unprepare().await, Ok(()));
}

#[tokio::test]
async fn claim_given_inline_is_listed_separately() {
    let ((home, gpu, _), a) = (home(), pod("a"));
    let daemon = start(&home, &[&gpu], &[]);
    let given = claim("given", &["gpu/0", "gpu/1"], &[]);
    let ask = || {
        daemon
            .manager
            .kubelet
            .prepare_given(&gpu.name, given.clone(), "test".into())
    };
    let first = ask().await.unwrap();
    assert_eq!(
        first.cdi_names(),
        [
            "gpu.example.com/claim=uid-given-0",
            "gpu.example.com/claim=uid-given-1"
        ]
    );
    assert_eq!(ask().await, Ok(first));
    assert_eq!(gpu.counts(), (1, 0));
    let one = claim("one", &["gpu/2"], &[&a]);
    daemon.source.put(one.clone());
    daemon.kubelet_prepare(&gpu.name, &one).await.unwrap();
    let given_to = |daemon: &Daemon| {
        let is_given = |claim: &ClaimRecord| claim.kubelet.as_ref().is_some_and(|hold| hold.given);
        let claims = daemon
            .manager
            .records
            .claims()
            .into_iter()
            .filter(|claim| is_given(claim));
        claims.map(|claim| claim.id.clone()).collect::<Vec<_>>()
    };
    assert_eq!(
        (held(&daemon)[0].0.as_str(), held(&daemon).len()),
        ("uid-one", 1)
    );
    assert_eq!(given_to(&daemon), std::slice::from_ref(&given.id));
    daemon.stop().await;
    let daemon = start(&home, &[&gpu], &[]);
    assert_eq!(given_to(&daemon).len(), 1, "also after a start");
    assert_eq!(daemon.kubelet_unprepare(&gpu.name, &given).await, Ok(()));
    assert!(given_to(&daemon).is_empty());
}

#[tokio::test]
async fn statuses_are_reported_while_held() {
    let ((home, gpu, nic), a) = (home(), pod("a"));
    let (both, quiet) = (
        claim("both", &["gpu/0#s", "nic/0"], &[&a]),
        claim("quiet", &["gpu/1"], &[&a]),
    );
    let daemon = start(&home, &[&gpu, &nic], &[&both, &quiet]);
    let mut changes = daemon.manager.records.device_status_changes();
    daemon.kubelet_prepare(&gpu.name, &quiet).await.unwrap();
    assert!(!changes.has_changed().unwrap() && device_statuses(&daemon).is_empty());
    let status = DeviceStatus {
        data: Some("{\"mtu\":9000}".to_owned()),
        ..DeviceStatus::default()
    };
    gpu.reply("uid-both", Reply::Status(status.clone()));
    daemon.kubelet_prepare(&gpu.name, &both).await.unwrap();
    daemon.kubelet_prepare(&nic.name, &both).await.unwrap();
    assert!(changes.has_changed().unwrap());
    let statuses = device_statuses(&daemon);
    assert_eq!(
        (
            statuses.len(),
            &statuses[0].claim,
            statuses[0].devices.len()
        ),
        (1, &both.id, 1)
    );
    let device = &statuses[0].devices[0];
    assert_eq!(
        (&device.driver, device.share_id.as_deref(), &device.status),
        (&gpu.name, Some("s"), &status)
    );
    changes.mark_unchanged();
    daemon.kubelet_unprepare(&gpu.name, &both).await.unwrap();
    assert!(changes.has_changed().unwrap() && device_statuses(&daemon).is_empty());
}

#[tokio::test]
async fn operator_cannot_release_kubelets_claim() {
    let (_home, daemon, gpu, one) = one();
    daemon.kubelet_prepare(&gpu.name, &one).await.unwrap();
    assert_eq!(code(daemon.release("one").await), "claim-in-use");
    daemon.retire(&gpu);
    assert!(daemon.kubelet_unprepare(&gpu.name, &one).await.is_err());
    assert_eq!(code(daemon.release("one").await), "done");
    assert_eq!(daemon.kubelet_unprepare(&gpu.name, &one).await, Ok(()));
}

#[tokio::test]
async fn early_claim_needs_no_second_call() {
    let (_home, daemon, gpu, mut one) = one();
    let binding = BindingConditions {
        conditions: vec![
            "example.com/attached".to_owned(),
            BindingConditions::PREPARED.to_owned(),
        ],
        failures: vec![BindingConditions::PREPARE_FAILED.to_owned()],
    };
    one.allocation.as_mut().unwrap().devices[0].binding = binding;
    daemon.source.put(one.clone());
    let attached = Condition {
        kind: "example.com/attached".to_owned(),
        status: Some(true),
        reason: "Attached".to_owned(),
        message: String::new(),
    };
    let status = DeviceStatus {
        conditions: vec![attached],
        ..DeviceStatus::default()
    };
    gpu.reply("uid-one", Reply::Status(status));
    let mut changes = daemon.manager.records.device_status_changes();
    daemon
        .manager
        .kubelet
        .prepare_early(&gpu.name, one.clone(), "test".into())
        .await
        .unwrap();
    assert!(changes.has_changed().unwrap());
    changes.mark_unchanged();
    let types = || {
        let statuses = device_statuses(&daemon);
        let conditions = statuses
            .iter()
            .flat_map(|claim| &claim.devices)
            .flat_map(|device| &device.status.conditions);
        conditions
            .map(|condition| (condition.kind.clone(), condition.status))
            .collect::<Vec<_>>()
    };
    let expected = [BindingConditions::PREPARED, "example.com/attached"]
        .map(|kind| (kind.to_owned(), Some(true)));
    assert_eq!(types(), expected);
    assert!(
        daemon
            .manager
            .kubelet
            .held_claim(&one.id.uid)
            .unwrap()
            .early
    );

    daemon.kubelet_prepare(&gpu.name, &one).await.unwrap();
    assert_eq!((gpu.counts(), types()), ((1, 0), expected.to_vec()));
    assert!(
        !daemon
            .manager
            .kubelet
            .held_claim(&one.id.uid)
            .unwrap()
            .early
    );
    daemon
        .manager
        .kubelet
        .unprepare_early(&one.id.uid, "not nominated")
        .await
        .unwrap();
    assert_eq!(gpu.counts(), (1, 0), "it is the kubelet's");
    assert_eq!(daemon.kubelet_unprepare(&gpu.name, &one).await, Ok(()));
    assert_eq!((gpu.counts(), types()), ((1, 1), vec![]));
}

#[tokio::test]
async fn early_claim_is_unprepared_after_restart() {
    let (home, gpu, _) = home();
    let one = claim("one", &["gpu/0"], &[&pod("a")]);
    let daemon = start(&home, &[&gpu], &[&one]);
    daemon
        .manager
        .kubelet
        .prepare_early(&gpu.name, one.clone(), "test".into())
        .await
        .unwrap();
    daemon.stop().await;
    let daemon = start(&home, &[&gpu], &[&one]);
    assert!(
        daemon
            .manager
            .kubelet
            .held_claim(&one.id.uid)
            .unwrap()
            .early
    );
    daemon
        .manager
        .kubelet
        .unprepare_early(&one.id.uid, "not nominated")
        .await
        .unwrap();
    assert_eq!(gpu.counts(), (1, 1));
    assert!(daemon.manager.records.claims().is_empty() && daemon.cdi_files().is_empty());
    // Of a claim that is not there nothing has to be released.
    assert_eq!(
        daemon
            .manager
            .kubelet
            .unprepare_early(&one.id.uid, "not nominated")
            .await,
        Ok(())
    );
}
