//! Death at each named point, at its first pass and at every later one, with pods that come back afterwards and with pods that do not.

use std::time::Instant;

use nodedock_base::failpoint::Point;
use nodedock_proto::node::v1;
use nodedock_tests::compose::pod;
use nodedock_tests::machine::tell;
use nodedock_tests::wait::until_path;
use tonic::Status;

use crate::driver::{Driver, Native, Wasm};
use crate::scene::{Known, Scene, assert_killed, request_of};
use crate::{Death, Place, adapters, bindings, every_pass, resources, swap, values};

/// Requests to the daemon.
#[derive(Debug, Clone, Copy)]
enum Step {
    Prepare(&'static str, &'static [&'static str]),
    /// The driver refuses the claim for good.
    Refused(&'static str, &'static str),
    Unprepare(&'static str),
}

/// A pod whose claim is prepared before the daemon is started to die: what a start finds.
const BEFORE: &str = "before";
const CLAIM_BEFORE: &str = "device-0";

const STEPS: [Step; 7] = [
    Step::Prepare("one", &["device-1", "device-2"]),
    Step::Prepare("two", &["device-1"]),
    Step::Refused("three", "refuse-permanent"),
    Step::Unprepare("one"),
    Step::Unprepare("two"),
    Step::Unprepare("three"),
    Step::Unprepare(BEFORE),
];

/// Points that need CDI files of ours, which a native plugin's claims do not have.
const NOT_NATIVE: [Point; 4] = [
    Point::OrphanFound,
    Point::OrphanRemoved,
    Point::CdiStaged,
    Point::CdiRenamed,
];

fn points<D: Driver>() -> impl Iterator<Item = Point> {
    let elsewhere = |point: &Point| {
        [
            &adapters::POINTS[..],
            &bindings::POINTS,
            &resources::POINTS,
            &swap::POINTS,
            &values::POINTS,
        ]
        .iter()
        .any(|of| of.contains(point))
    };
    let of_claims = Point::ALL
        .iter()
        .copied()
        .filter(move |point| !elsewhere(point));
    of_claims.filter(|point| D::EDITS || !NOT_NATIVE.contains(point))
}

/// The steps on a scene in which the daemon may die once.
struct Scenario<'a, D> {
    scene: &'a mut Scene<D>,
    death: Death,
    died: bool,
}

impl<D: Driver> Scenario<'_, D> {
    /// Plays the steps, and returns whether the daemon died.
    async fn run(mut self) -> bool {
        let _place = Place(format!("with {:?} and {}", self.death, D::NAME));
        self.before().await;
        for step in STEPS {
            self.take(step).await;
        }
        self.scene.clean().await;
        if !self.died {
            self.scene.daemon.kill9().await;
            self.again().await;
        }
        self.died
    }

    /// A claim is prepared, the daemon is killed, and started to die.
    async fn before(&mut self) {
        let request = request_of::<D>(BEFORE, &[CLAIM_BEFORE]);
        let answer = self.scene.daemon.prepared(request).await;
        self.scene
            .known
            .insert(BEFORE.to_owned(), Known::Prepared(answer));
        let files = self.scene.daemon.cdi_files();
        self.scene.daemon.kill9().await;
        if D::EDITS {
            self.disturb();
        }
        self.scene.daemon.arm(self.death.point, self.death.pass);
        if let Err(status) = self.scene.daemon.try_run().await {
            assert_killed(status);
            return self.restart_after_crash().await;
        }
        let daemon = &self.scene.daemon;
        let as_before = || match daemon.cdi_files() {
            seen if seen == files => Ok(()),
            seen => Err(format!("{seen:#?}")),
        };
        let dir = daemon.cdi();
        tokio::select! {
            // The next step meets a daemon that died.
            () = daemon.death() => {}
            () = until_path(&dir, "the CDI directory is as before", as_before) => {}
        }
        // The same: that it died is found by who asks next.
        let _ = self
            .scene
            .daemon
            .try_until_driver(D::NAME, |driver| driver.state == "serving")
            .await;
    }

    /// The file of the claim is lost, and there is one of an unknown claim.
    fn disturb(&self) {
        let file = self.scene.daemon.only_cdi_file();
        let (known, unknown) = (file.claim_uid(), "claim-unknown");
        let path = file.path.display().to_string();
        std::fs::write(
            path.replace(known, unknown),
            file.text.replace(known, unknown),
        )
        .expect("write a file");
        std::fs::remove_file(path).expect("remove a file");
    }

    async fn take(&mut self, step: Step) {
        let Err(status) = self.ask(step).await else {
            return;
        };
        assert!(
            !self.died,
            "{step:?}: {status}\n{}",
            self.scene.daemon.log()
        );
        assert_killed(self.scene.daemon.ended().await);
        self.restart_after_crash().await;
        match step {
            _ if self.death.pods_return => self.asked(step).await,
            Step::Prepare(name, _) | Step::Refused(name, _) => {
                self.asked(Step::Unprepare(name)).await
            }
            Step::Unprepare(_) => {}
        }
    }

    /// Starts the daemon that died, and lets the pods that know their devices ask for them again.
    async fn restart_after_crash(&mut self) {
        self.died = true;
        self.again().await;
        for (name, known) in &self.scene.known {
            if let (Known::Prepared(answer), true) = (known, self.death.pods_return) {
                let claims: Vec<_> = answer
                    .claims
                    .iter()
                    .filter_map(|claim| claim.id.as_ref())
                    .collect();
                let claims: Vec<_> = claims.iter().map(|id| &id.name).collect();
                assert_eq!(
                    self.scene
                        .daemon
                        .prepared(request_of::<D>(name, &claims))
                        .await,
                    *answer
                );
            }
        }
    }

    async fn again(&mut self) {
        self.scene.daemon.disarm();
        self.scene.restart().await;
    }

    async fn asked(&mut self, step: Step) {
        let asked = self.ask(step).await;
        asked.unwrap_or_else(|status| panic!("{step:?}: {status}\n{}", self.scene.daemon.log()));
    }

    /// Asks, and keeps what the pod knows then.
    async fn ask(&mut self, step: Step) -> Result<(), Status> {
        let (Step::Prepare(name, _) | Step::Refused(name, _) | Step::Unprepare(name)) = step;
        self.scene.known.insert(name.to_owned(), Known::Unknown);
        let mut client = self.scene.daemon.client();
        let known = match step {
            Step::Prepare(_, claims) => {
                let answer = client
                    .prepare_pod(request_of::<D>(name, claims))
                    .await?
                    .into_inner();
                assert!(
                    answer
                        .claims
                        .iter()
                        .all(|claim| claim.outcome == "prepared"),
                    "{answer:#?}"
                );
                Known::Prepared(answer)
            }
            Step::Refused(_, claim) => {
                let answer = client
                    .prepare_pod(request_of::<D>(name, &[claim]))
                    .await?
                    .into_inner();
                let code = answer.claims[0]
                    .problem
                    .as_ref()
                    .map(|problem| problem.code.as_str());
                assert_eq!(code, Some("driver-refused"), "{answer:#?}");
                Known::Gone
            }
            Step::Unprepare(_) => {
                let request = v1::UnpreparePodRequest {
                    pod: Some(pod(name)),
                };
                let answer = client.unprepare_pod(request).await?.into_inner();
                assert!(
                    answer.claims.iter().all(|claim| claim.problem.is_none()),
                    "{answer:#?}"
                );
                Known::Gone
            }
        };
        self.scene.known.insert(name.to_owned(), known);
        Ok(())
    }
}

/// Dies at one pass after the other of each point, until the point is passed no more.
async fn die_everywhere<D: Driver>() {
    let mut scene = Scene::<D>::start().await;
    let (started, mut deaths, mut reached) = (Instant::now(), 0, 0);
    for point in points::<D>() {
        for pods_return in [true, false] {
            let run = async |pass| {
                let death = Death {
                    point,
                    pass,
                    pods_return,
                };
                Scenario {
                    scene: &mut scene,
                    death,
                    died: false,
                }
                .run()
                .await
            };
            deaths += every_pass(point, run).await;
        }
        reached += 1;
    }
    let (elapsed, restarts) = (started.elapsed(), scene.restart_times());
    tell(&format!(
        "{}: {deaths} deaths at {reached} points in {elapsed:.0?}; {restarts}",
        D::NAME
    ));
}

#[tokio::test]
async fn crash_point_loses_no_wasm_state() {
    die_everywhere::<Wasm>().await;
}

#[tokio::test]
async fn crash_point_loses_no_native_state() {
    die_everywhere::<Native>().await;
}
