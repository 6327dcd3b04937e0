//! Values below `/sys` that drivers change for claims: durable before they are written, and restored where the driver does not.

mod turns;

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;

use crate::checkpoint::Change;
use crate::driver::values::{Journal, Write};
use crate::driver::{Call, ClaimDriver, Outcomes};
use crate::manager::claims::fixtures::{claim, driver, permanent, pod, prepared, transient, uid};
use crate::manager::claims::machine;
use crate::manager::claims::retries::RELEASE_GRACE;
use crate::manager::tests::scene::{Daemon, Home, ends, release_request};
use crate::records::RecordedValues;
use nodedock_model::{
    ClaimState, DriverClaim, DriverClaimRecord, DriverKind, DriverName, ObjectRef, PreparedClaim,
    Problem, PutBack, PutBackEnd, ReleaseRecord,
};

const LED: &str = "devices/led/brightness";
const FAN: &str = "devices/fan/speed";

fn plugged(home: &Home) {
    for path in [LED, FAN] {
        let path = home.sys().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "0").unwrap();
    }
}

fn is(home: &Home, path: &str) -> String {
    std::fs::read_to_string(home.sys().join(path)).unwrap()
}

/// Writes as the sandbox does for a driver.
struct Writer {
    name: DriverName,
    values: Arc<RecordedValues>,
    sys: PathBuf,
    /// Writes of a prepare and of an unprepare, by claim name.
    prepares: Mutex<BTreeMap<String, Vec<(&'static str, &'static str)>>>,
    unprepares: Mutex<BTreeMap<String, Vec<(&'static str, &'static str)>>>,
    /// Problem with which every claim is refused after its writes.
    refusal: Mutex<Option<Problem>>,
    /// The claims of one call are written for together.
    together: bool,
}

impl Writer {
    fn new(home: &Home, daemon: &Daemon) -> Arc<Self> {
        Self::with(home, daemon, false)
    }

    fn with(home: &Home, daemon: &Daemon, together: bool) -> Arc<Self> {
        Arc::new(Self {
            name: driver("led"),
            values: daemon.values.clone(),
            sys: home.sys(),
            prepares: Mutex::default(),
            unprepares: Mutex::default(),
            refusal: Mutex::default(),
            together,
        })
    }

    fn serve(self: &Arc<Self>, daemon: &Daemon) {
        daemon.serve_any(
            &self.name,
            DriverKind::Wasm,
            Some(self.clone()),
            None,
            "sha256:00",
        );
    }

    fn writes(&self, claim: &str, writes: &[(&'static str, &'static str)]) {
        self.prepares
            .lock()
            .unwrap()
            .insert(claim.to_owned(), writes.to_vec());
    }

    fn clears(&self, claim: &str, writes: &[(&'static str, &'static str)]) {
        self.unprepares
            .lock()
            .unwrap()
            .insert(claim.to_owned(), writes.to_vec());
    }

    fn read(&self, path: &str) -> (u64, String) {
        let file = self.sys.join(path);
        (
            std::fs::metadata(&file).unwrap().ino(),
            std::fs::read_to_string(file).unwrap(),
        )
    }

    async fn write(&self, claims: &[ObjectRef], path: &str, value: &str) -> Result<(), Problem> {
        let _turn = self.values.lock_path(path).await;
        let (inode, before) = self.read(path);
        let (driver, before) = (&self.name, Some(before.as_str()));
        let write = Write {
            driver,
            claims,
            path,
            inode,
            before,
            value,
        };
        self.values.intend(&write).await?;
        std::fs::write(self.sys.join(path), value).unwrap();
        self.values.settle(&write, Some(value.to_owned()));
        Ok(())
    }
}

#[async_trait]
impl ClaimDriver for Writer {
    async fn prepare(&self, _: &Call, claims: &[DriverClaim]) -> Outcomes<PreparedClaim> {
        let mut outcomes = Outcomes::new();
        let all: Vec<_> = claims.iter().map(|claim| claim.id.clone()).collect();
        for claim in claims {
            let writes = self
                .prepares
                .lock()
                .unwrap()
                .get(claim.id.name.as_str())
                .cloned();
            let mut outcome = Ok(prepared(&claim.devices, ""));
            for (path, value) in writes.unwrap_or_default() {
                let of = if self.together {
                    &all
                } else {
                    std::slice::from_ref(&claim.id)
                };
                outcome = outcome.and(
                    self.write(of, path, value)
                        .await
                        .map(|()| prepared(&claim.devices, "")),
                );
            }
            let refusal = self.refusal.lock().unwrap().clone();
            outcomes.insert(claim.id.uid.clone(), refusal.map_or(outcome, Err));
        }
        outcomes
    }

    async fn unprepare(&self, _: &Call, claims: &[DriverClaimRecord]) -> Outcomes<()> {
        let mut outcomes = Outcomes::new();
        for live in claims {
            let id = &live.claim.id;
            let writes = self
                .unprepares
                .lock()
                .unwrap()
                .get(id.name.as_str())
                .cloned();
            let mut outcome = Ok(());
            for (path, value) in writes.unwrap_or_default() {
                outcome = outcome.and(self.write(std::slice::from_ref(id), path, value).await);
            }
            outcomes.insert(id.uid.clone(), outcome);
        }
        outcomes
    }
}

/// Path, value found and outcome, or the code of the problem.
fn outcomes(record: &ReleaseRecord) -> Vec<(&str, Option<&str>, &str)> {
    record.put_back.iter().map(one).collect()
}

fn one(end: &PutBack) -> (&str, Option<&str>, &str) {
    let word = end
        .problem
        .as_ref()
        .map_or(end.end.as_str(), |problem| &problem.code);
    (&end.path, end.found.as_deref(), word)
}

/// A daemon with the files of `/sys`, the pod `a`, and a driver that does not serve yet.
fn with_writer() -> (Home, Daemon, ObjectRef, Arc<Writer>) {
    let home = Home::new();
    plugged(&home);
    let daemon = home.start();
    let led = Writer::new(&home, &daemon);
    (home, daemon, pod("a"), led)
}

/// A claim whose driver is gone, and whose pod is.
async fn stuck(daemon: &Daemon, led: &Arc<Writer>, short: &str, device: &str) {
    let a = pod(&format!("pod-{short}"));
    led.serve(daemon);
    daemon.source.put(claim(short, &[device], &[&a]));
    assert_eq!(ends(&daemon.prepare(&a, &[short]).await), ["prepared"]);
    daemon.registry.retire(led.name.as_str());
    assert!(daemon.unprepare(&a).await[0].is_err());
}

/// A daemon with a claim `one` for which a driver that is gone has made these writes.
async fn one_stuck(home: &Home, writes: &[(&'static str, &'static str)]) -> (Daemon, Arc<Writer>) {
    plugged(home);
    let daemon = home.start();
    let led = Writer::new(home, &daemon);
    led.writes("one", writes);
    stuck(&daemon, &led, "one", "led/0").await;
    (daemon, led)
}

/// The same, with a claim `two` that changed the same value after it.
async fn two_stuck(home: &Home) -> (Daemon, Arc<Writer>) {
    let (daemon, led) = one_stuck(home, &[(LED, "1")]).await;
    led.writes("two", &[(LED, "2")]);
    stuck(&daemon, &led, "two", "led/1").await;
    (daemon, led)
}

#[tokio::test]
async fn released_values_are_restored_newest_first() {
    let home = Home::new();
    let (daemon, _) = one_stuck(&home, &[(LED, "1"), (FAN, "2"), (LED, "3")]).await;
    daemon.stop().await;

    let daemon = home.start();
    let values = daemon
        .manager
        .releases
        .preview(&release_request("one"))
        .await
        .unwrap()
        .values;
    assert!(
        values.iter().all(|value| value.end == PutBackEnd::Possible),
        "{values:?}"
    );
    assert_eq!(
        (is(&home, LED), is(&home, FAN)),
        ("3".into(), "2".into()),
        "looking changes nothing"
    );
    let view = daemon
        .manager
        .retries
        .claim_view(daemon.manager.records.claims().remove(0));
    assert_eq!(view.values.unwrap().newest_first().len(), 2);

    let released = daemon.release("one").await.unwrap();
    assert_eq!(
        outcomes(&released),
        [(FAN, Some("2"), "put-back"), (LED, Some("3"), "put-back")]
    );
    assert_eq!((is(&home, LED), is(&home, FAN)), ("0".into(), "0".into()));
    daemon.stop().await;
    let daemon = home.start();
    assert_eq!(
        *daemon.manager.records.released_claims()[0],
        released,
        "durable"
    );
    assert_eq!(daemon.values.of(&uid("uid-one")), None);
}

#[tokio::test]
async fn writes_require_a_durable_record() {
    let (home, daemon, _, led) = with_writer();
    let one = [claim("one", &[], &[]).id];
    daemon.crash().await;
    let problem = led.write(&one, LED, "1").await.unwrap_err();
    assert_eq!(problem.code, "checkpoint-unavailable");
    assert_eq!(is(&home, LED), "0");
    assert!(
        daemon
            .values
            .of(&uid("uid-one"))
            .is_none_or(|values| values.newest_first().is_empty())
    );
}

/// The daemon dies between a write and its result: what was there is known all the same.
#[tokio::test]
async fn crash_during_call_loses_no_value() {
    for written in [false, true] {
        let (home, daemon, a, led) = with_writer();
        *led.refusal.lock().unwrap() = Some(transient());
        led.serve(&daemon);
        daemon.source.put(claim("one", &["led/0"], &[&a]));
        // Leaves the claim in `preparing`, as a call that was interrupted does.
        daemon.prepare(&a, &["one"]).await;
        let one = [claim("one", &[], &[]).id];
        let (inode, _) = led.read(LED);
        let (driver, claims, path, before) = (&led.name, &one[..], LED, Some("0"));
        led.values
            .intend(&Write {
                driver,
                claims,
                path,
                inode,
                before,
                value: "1",
            })
            .await
            .unwrap();
        if written {
            std::fs::write(home.sys().join(LED), "1").unwrap();
        }
        daemon.crash().await;
        drop((daemon, led));

        let daemon = home.start();
        assert!(
            daemon.unprepare(&a).await[0].is_err(),
            "its driver is not there"
        );
        let released = daemon.release("one").await.unwrap();
        let expected = if written {
            (LED, Some("1"), "put-back")
        } else {
            (LED, Some("0"), "as-before")
        };
        assert_eq!(outcomes(&released), [expected]);
        assert_eq!(is(&home, LED), "0");
    }
}

/// The counted values that drivers left behind, by outcome.
fn left(daemon: &Daemon, outcome: &str) -> u64 {
    let labels = [
        ("driver", driver("led").to_string()),
        ("outcome", outcome.to_owned()),
    ];
    daemon.values.left.values.get_or_create(&labels).get()
}

#[tokio::test]
async fn value_left_by_unprepare_is_restored() {
    let (home, daemon, a, led) = with_writer();
    led.writes("one", &[(LED, "1"), (FAN, "2")]);
    led.clears("one", &[(LED, "0")]);
    led.serve(&daemon);
    daemon.source.put(claim("one", &["led/0"], &[&a]));
    daemon.prepare(&a, &["one"]).await;
    assert_eq!(
        daemon
            .values
            .of(&uid("uid-one"))
            .unwrap()
            .newest_first()
            .len(),
        2
    );
    assert!(daemon.unprepare(&a).await[0].is_ok());
    assert_eq!((is(&home, LED), is(&home, FAN)), ("0".into(), "0".into()));
    assert_eq!(
        (left(&daemon, "put-back"), left(&daemon, "left")),
        (1, 0),
        "of two values the driver left one"
    );
    assert_eq!(daemon.values.of(&uid("uid-one")), None);
    daemon.stop().await;
    assert_eq!(home.start().values.of(&uid("uid-one")), None);
}

/// Values that the host must not touch: another program's, and those of a device that is gone.
#[tokio::test]
async fn foreign_values_survive_an_unprepare() {
    let (home, daemon, a, led) = with_writer();
    led.writes("one", &[(LED, "1"), (FAN, "2")]);
    led.serve(&daemon);
    daemon.source.put(claim("one", &["led/0"], &[&a]));
    daemon.prepare(&a, &["one"]).await;
    std::fs::write(home.sys().join(LED), "9").unwrap();
    std::fs::remove_file(home.sys().join(FAN)).unwrap();
    assert!(daemon.unprepare(&a).await[0].is_ok());
    assert_eq!(is(&home, LED), "9");
    assert_eq!((left(&daemon, "put-back"), left(&daemon, "left")), (0, 0));
}

/// A daemon that dies after the driver's answer, and one whose driver is replaced, know the previous value.
#[tokio::test]
async fn left_value_is_restored_after_crash() {
    let (home, daemon, a, led) = with_writer();
    led.writes("one", &[(LED, "1")]);
    led.serve(&daemon);
    daemon.source.put(claim("one", &["led/0"], &[&a]));
    assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["prepared"]);
    daemon.crash().await;
    drop((daemon, led));
    let daemon = home.start();
    let led = Writer::new(&home, &daemon);
    daemon.serve_any(
        &led.name,
        DriverKind::Wasm,
        Some(led.clone()),
        None,
        "sha256:11",
    );
    assert!(daemon.unprepare(&a).await[0].is_ok());
    assert_eq!(is(&home, LED), "0");
    assert_eq!(left(&daemon, "put-back"), 1);
}

/// Two claims of one driver that changed the same value, each of a pod of its own.
async fn two_prepared(home: &Home, second: &'static str) -> (Daemon, Arc<Writer>) {
    plugged(home);
    let daemon = home.start();
    let led = Writer::new(home, &daemon);
    led.writes("one", &[(LED, "1")]);
    led.writes("two", &[(LED, second)]);
    led.serve(&daemon);
    for (short, device) in [("one", "led/0"), ("two", "led/1")] {
        let pod = pod(&format!("pod-{short}"));
        daemon.source.put(claim(short, &[device], &[&pod]));
        assert_eq!(ends(&daemon.prepare(&pod, &[short]).await), ["prepared"]);
    }
    (daemon, led)
}

#[tokio::test]
async fn shared_value_outlives_its_first_claim() {
    for second in ["1", "2"] {
        let home = Home::new();
        let (daemon, _) = two_prepared(&home, second).await;
        assert!(daemon.unprepare(&pod("pod-one")).await[0].is_ok());
        assert_eq!(is(&home, LED), second, "the other claim needs it");
        assert_eq!(left(&daemon, "put-back"), 0);
        assert!(daemon.unprepare(&pod("pod-two")).await[0].is_ok());
        assert_eq!(is(&home, LED), "0", "the oldest value");
        assert_eq!(left(&daemon, "put-back"), 1);
    }
}

/// Each claim wrote back what it had found, the first one first: the value of the first claim stayed.
#[tokio::test]
async fn oldest_value_wins_over_found_one() {
    let home = Home::new();
    let (daemon, led) = two_prepared(&home, "2").await;
    led.clears("one", &[(LED, "0")]);
    led.clears("two", &[(LED, "1")]);
    assert!(daemon.unprepare(&pod("pod-one")).await[0].is_ok());
    assert!(daemon.unprepare(&pod("pod-two")).await[0].is_ok());
    assert_eq!(is(&home, LED), "0");
}

#[tokio::test]
async fn finally_refused_prepare_restores_values() {
    for clears_up in [false, true] {
        let (home, daemon, a, led) = with_writer();
        led.writes("one", &[(LED, "1"), (FAN, "2")]);
        if clears_up {
            led.clears("one", &[(LED, "0"), (FAN, "5")]);
        }
        *led.refusal.lock().unwrap() = Some(permanent());
        led.serve(&daemon);
        daemon.source.put(claim("one", &["led/0"], &[&a]));
        assert_eq!(
            ends(&daemon.prepare(&a, &["one"]).await),
            ["bad-parameters"]
        );
        assert_eq!(daemon.state("uid-one"), None);
        // A driver that is asked to clear up writes for the claim as well, so that is undone with the rest.
        assert_eq!(
            (is(&home, LED), is(&home, FAN)),
            ("0".into(), "0".into()),
            "clears up: {clears_up}"
        );
        assert_eq!(daemon.values.of(&uid("uid-one")), None);
    }
}

#[tokio::test]
async fn temporary_refusal_keeps_first_value() {
    let (home, daemon, a, led) = with_writer();
    led.writes("one", &[(LED, "1")]);
    *led.refusal.lock().unwrap() = Some(transient());
    led.serve(&daemon);
    daemon.source.put(claim("one", &["led/0"], &[&a]));
    assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["device-busy"]);
    assert_eq!(is(&home, LED), "1");
    *led.refusal.lock().unwrap() = None;
    led.writes("one", &[(LED, "2")]);
    assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["prepared"]);
    let values = daemon.values.of(&uid("uid-one")).unwrap();
    let [(_, kept)] = values.newest_first()[..] else {
        panic!("{values:?}")
    };
    assert_eq!(
        (kept.before.as_deref(), kept.after.as_deref()),
        (Some("0"), Some("2"))
    );
}

/// A release whose intent is durable, and nothing else of it.
async fn begin_release(daemon: &Daemon, claim: &str) {
    let (intent, _) = machine::release(
        &daemon.manager.records.claims()[0],
        1,
        &release_request(claim).by,
    );
    daemon
        .manager
        .records
        .commit_claims(vec![intent])
        .await
        .unwrap();
}

#[tokio::test]
async fn interrupted_release_finishes_after_restart() {
    let home = Home::new();
    let (daemon, led) = one_stuck(&home, &[(LED, "1"), (FAN, "2")]).await;
    // One of the two values is restored, and the daemon dies.
    begin_release(&daemon, "one").await;
    std::fs::write(home.sys().join(FAN), "0").unwrap();
    daemon.crash().await;
    drop((daemon, led));

    tokio::time::pause();
    let (daemon, started) = (home.start(), tokio::time::Instant::now());
    daemon.starts.unprepares();
    daemon.gone("uid-one").await;
    assert!(
        started.elapsed() >= RELEASE_GRACE,
        "its driver may have come"
    );
    let released = daemon.manager.records.released_claims().remove(0);
    assert_eq!(released.by, release_request("one").by);
    assert_eq!(
        outcomes(&released),
        [(FAN, Some("0"), "as-before"), (LED, Some("1"), "put-back")]
    );
    assert_eq!(is(&home, LED), "0");
}

/// The host recorded of a driver that came a moment later that it had not unprepared the claim.
#[tokio::test]
async fn returning_driver_completes_interrupted_release() {
    let home = Home::new();
    let (daemon, led) = one_stuck(&home, &[(LED, "1")]).await;
    begin_release(&daemon, "one").await;
    daemon.crash().await;
    drop((daemon, led));

    let daemon = home.start();
    daemon.starts.unprepares();
    // As long as it takes to ask drivers, and to write down what came of it.
    for _ in 0..8 {
        tokio::task::yield_now().await;
        daemon.checkpoint().probe().await.unwrap();
    }
    assert_eq!(daemon.state("uid-one"), Some(ClaimState::Unpreparing));
    Writer::new(&home, &daemon).serve(&daemon);
    daemon.gone("uid-one").await;
    let released = daemon.manager.records.released_claims().remove(0);
    assert_eq!(
        (released.untold.len(), outcomes(&released)),
        (0, vec![(LED, Some("1"), "value-left")])
    );
    assert_eq!(is(&home, LED), "0");
}

#[tokio::test]
async fn interrupted_release_finishes_after_reboot() {
    let home = Home::new();
    plugged(&home);
    let daemon = home.start_in("boot-1");
    stuck(&daemon, &Writer::new(&home, &daemon), "one", "led/0").await;
    begin_release(&daemon, "one").await;
    daemon.stop().await;
    tokio::time::pause();
    let daemon = home.start_in("boot-2");
    daemon.starts.unprepares();
    daemon.gone("uid-one").await;
    let released = daemon.manager.records.released_claims().remove(0);
    assert_eq!(
        (&released.by, released.untold.len()),
        (&release_request("one").by, 1)
    );
}

#[tokio::test]
async fn values_of_earlier_boot_are_discarded() {
    let home = Home::new();
    let (daemon, _) = one_stuck(&home, &[(LED, "1")]).await;
    daemon.stop().await;
    let daemon = home.start_in("boot-2");
    assert_eq!(daemon.values.of(&uid("uid-one")), None);
    assert_eq!(outcomes(&daemon.release("one").await.unwrap()), []);
    assert_eq!(is(&home, LED), "1");
    daemon.manager.unfinished.resume_values().await;
    daemon.stop().await;
    let daemon = home.start_in("boot-1");
    assert_eq!(
        daemon.values.of(&uid("uid-one")),
        None,
        "they are gone from the checkpoint"
    );
}

#[tokio::test]
async fn foreign_value_is_kept_and_reported() {
    let home = Home::new();
    let (daemon, _) = one_stuck(&home, &[(LED, "1"), (FAN, "2")]).await;
    std::fs::write(home.sys().join(LED), "9").unwrap();
    std::fs::remove_file(home.sys().join(FAN)).unwrap();
    let released = daemon.release("one").await.unwrap();
    assert_eq!(
        outcomes(&released),
        [(FAN, None, "path-gone"), (LED, Some("9"), "value-changed")]
    );
    assert_eq!(is(&home, LED), "9");
}

/// The rule of docs/decisions/0005: as if the earlier claim had never been, also across a restart.
#[tokio::test]
async fn later_claim_inherits_the_original_value() {
    let home = Home::new();
    let (daemon, _) = two_stuck(&home).await;
    assert_eq!(
        outcomes(&daemon.release("one").await.unwrap()),
        [(LED, None, "value-of-another-claim")]
    );
    assert_eq!(is(&home, LED), "2");
    daemon.stop().await;
    let daemon = home.start();
    assert_eq!(
        outcomes(&daemon.release("two").await.unwrap()),
        [(LED, Some("2"), "put-back")]
    );
    assert_eq!(is(&home, LED), "0");
}

/// Values that were inherited at a start were in memory only, and lost at the next start.
#[tokio::test]
async fn inherited_value_is_durable() {
    let (home, daemon, _, led) = with_writer();
    led.write(&[claim("one", &[], &[]).id], LED, "1")
        .await
        .unwrap();
    led.write(&[claim("two", &[], &[]).id], LED, "2")
        .await
        .unwrap();
    daemon
        .values
        .tidy(|known| *known == uid("uid-two"))
        .await
        .unwrap();
    drop(led);
    daemon.stop().await;
    let daemon = home.start();
    assert_eq!(daemon.values.of(&uid("uid-one")), None);
    let values = daemon.values.of(&uid("uid-two")).unwrap();
    assert_eq!(values.newest_first()[0].1.before.as_deref(), Some("0"));
}

/// A driver that writes once for the claims `one` and `two` together.
fn writer_for_both(home: &Home, daemon: &Daemon, a: &ObjectRef) -> Arc<Writer> {
    let led = Writer::with(home, daemon, true);
    led.writes("one", &[(LED, "1")]);
    led.serve(daemon);
    daemon.source.put(claim("one", &["led/0"], &[a]));
    daemon.source.put(claim("two", &["led/1"], &[a]));
    led
}

#[tokio::test]
async fn last_claim_of_call_restores_value() {
    let home = Home::new();
    plugged(&home);
    let (daemon, a) = (home.start(), pod("a"));
    let led = writer_for_both(&home, &daemon, &a);
    assert_eq!(
        ends(&daemon.prepare(&a, &["one", "two"]).await),
        ["prepared"; 2]
    );
    daemon.registry.retire(led.name.as_str());
    assert!(daemon.unprepare(&a).await.iter().all(Result::is_err));
    assert_eq!(
        outcomes(&daemon.release("two").await.unwrap()),
        [(LED, None, "value-of-another-claim")]
    );
    assert_eq!(is(&home, LED), "1");
    assert_eq!(
        outcomes(&daemon.release("one").await.unwrap()),
        [(LED, Some("1"), "put-back")]
    );
    assert_eq!(is(&home, LED), "0");
}

/// Each was left because of the other, and the value stayed for good.
#[tokio::test]
async fn joint_rollback_restores_the_value() {
    let home = Home::new();
    plugged(&home);
    let (daemon, a) = (home.start(), pod("a"));
    let led = writer_for_both(&home, &daemon, &a);
    *led.refusal.lock().unwrap() = Some(permanent());
    assert_eq!(
        ends(&daemon.prepare(&a, &["one", "two"]).await),
        ["bad-parameters"; 2]
    );
    assert_eq!(is(&home, LED), "0");
    assert_eq!(
        (
            daemon.values.of(&uid("uid-one")),
            daemon.values.of(&uid("uid-two"))
        ),
        (None, None)
    );
}

#[tokio::test]
async fn release_reports_value_that_driver_left() {
    for restores in [false, true] {
        let home = Home::new();
        let (daemon, led) = one_stuck(&home, &[(LED, "1")]).await;
        if restores {
            led.clears("one", &[(LED, "0")]);
        }
        led.serve(&daemon);
        assert_eq!(daemon.state("uid-one"), Some(ClaimState::Unpreparing));
        let expected = if restores {
            vec![]
        } else {
            vec![(LED, Some("1"), "value-left")]
        };
        assert_eq!(
            outcomes(&daemon.release("one").await.unwrap()),
            expected,
            "{restores}"
        );
        assert_eq!(is(&home, LED), "0");
    }
}
