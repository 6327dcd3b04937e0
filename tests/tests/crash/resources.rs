//! Death at each named point of an allocation, with devices of a plugin and of a pool, and with pods that come back afterwards and
//! with pods that do not.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use native_device_plugin::{Device, Options, Plugin, Script};
use nodedock_base::failpoint::Point;
use nodedock_proto::node::v1;
use nodedock_tests::Daemon;
use nodedock_tests::compose::pod;
use nodedock_tests::drivers::MOCK_GPU_FILE;
use nodedock_tests::machine::tell;
use nodedock_tests::wait::until_path;
use tonic::Status;

use crate::scene::assert_killed;
use crate::{Death, Place, every_pass};

/// Points that only devices of extended resources pass.
pub(crate) const POINTS: [Point; 2] = [Point::AllocateCall, Point::AllocateAnswered];

/// Points that the devices pass as claims.
const OF_CLAIMS: [Point; 5] = [
    Point::PrepareIntended,
    Point::PrepareAnswered,
    Point::PrepareCommitted,
    Point::UnprepareAnswered,
    Point::UnprepareForgotten,
];
const LEAVING: [Point; 2] = [Point::UnprepareAnswered, Point::UnprepareForgotten];

const NIC: &str = "example.com/nic";
const GPU: &str = "example.com/gpu";
const NICS: u32 = 4;
const GPUS: u32 = 2;

#[derive(Debug, Clone, Copy)]
enum Step {
    Prepare(&'static str),
    Unprepare(&'static str),
}

const STEPS: [Step; 4] = [
    Step::Prepare("one"),
    Step::Prepare("two"),
    Step::Unprepare("one"),
    Step::Unprepare("two"),
];

struct Scene {
    daemon: Daemon,
    plugin: Plugin,
    /// Answers that pods received for devices that they did not release.
    known: BTreeMap<&'static str, v1::PreparePodResponse>,
}

/// Two NICs, of which two containers have one each, and a GPU.
fn request_of(name: &str) -> v1::PreparePodRequest {
    let container = |name: &str, resources: &[&str]| v1::Container {
        name: name.to_owned(),
        extended_resources: resources
            .iter()
            .map(|resource| ((*resource).to_owned(), 1))
            .collect(),
        ..Default::default()
    };
    let containers = vec![container("main", &[GPU, NIC]), container("second", &[NIC])];
    v1::PreparePodRequest {
        pod: Some(pod(name)),
        containers,
        ..Default::default()
    }
}

impl Scene {
    async fn start() -> Self {
        let daemon = Daemon::start().await;
        daemon.install_gpus(&format!(
            "pools:\n- {{name: gpus, count: {GPUS}, extendedResource: {GPU}}}\n"
        ));
        let options = Options::new(NIC, &daemon.state().join("device-plugins"));
        let plugin = Plugin::unregistered(options, Script::ok()).expect("make the plugin's socket");
        plugin.list(
            (0..NICS)
                .map(|n| Device::healthy(&format!("nic-{n}")))
                .collect(),
        );
        let scene = Self {
            daemon,
            plugin,
            known: BTreeMap::new(),
        };
        scene.sources().await;
        scene
    }

    /// The driver serves, and the plugin registers with the daemon of now. The log tells of the plugin's list before the next event,
    /// for which the daemon may wait a second.
    async fn sources(&self) {
        self.daemon.until_serving(MOCK_GPU_FILE).await;
        self.daemon.until_allocatable(GPU, GPUS as usize).await;
        let lists = || {
            self.daemon
                .log()
                .matches("device plugin listed its devices")
                .count()
        };
        let before = lists();
        // The daemon removed the socket when it started.
        self.plugin.serve().expect("make the plugin's socket");
        self.plugin.register().await.expect("it registers");
        let is_listed = || {
            if lists() > before {
                Ok(())
            } else {
                Err(before.to_string())
            }
        };
        until_path(
            &self.daemon.log_path(),
            "the plugin's devices are there",
            is_listed,
        )
        .await;
        self.daemon.until_allocatable(NIC, NICS as usize).await;
    }

    async fn run_again(&mut self) {
        self.daemon.run().await;
        self.sources().await;
    }

    /// Plays the steps, and returns whether the daemon died.
    async fn play(&mut self, death: Death) -> bool {
        let _place = Place(format!("with {death:?}"));
        self.daemon.kill9().await;
        self.daemon.arm(death.point, death.pass);
        self.run_again().await;
        let mut died = false;
        for step in STEPS {
            let Err(status) = self.ask(step).await else {
                continue;
            };
            assert!(!died, "{step:?}: {status}\n{}", self.daemon.log());
            died = true;
            assert_killed(self.daemon.ended().await);
            self.daemon.disarm();
            self.run_again().await;
            self.check().await;
            self.go_on(step, death.pods_return).await;
        }
        self.check().await;
        assert_eq!(self.daemon.pods().await, []);
        // Where it did not die it still may.
        if died {
            self.is_empty().await;
        }
        died
    }

    async fn go_on(&mut self, step: Step, pods_return: bool) {
        let step = match step {
            Step::Prepare(name) if !pods_return => Step::Unprepare(name),
            step => step,
        };
        let asked = self.ask(step).await;
        asked.unwrap_or_else(|status| panic!("{step:?}: {status}\n{}", self.daemon.log()));
        self.check().await;
    }

    async fn ask(&mut self, step: Step) -> Result<(), Status> {
        let mut client = self.daemon.client();
        match step {
            Step::Prepare(name) => {
                let answer = client.prepare_pod(request_of(name)).await?.into_inner();
                assert!(
                    answer.resources.iter().all(|of| of.outcome == "allocated"),
                    "{answer:#?}"
                );
                self.known.insert(name, answer);
            }
            Step::Unprepare(name) => {
                self.known.remove(name);
                let request = v1::UnpreparePodRequest {
                    pod: Some(pod(name)),
                };
                let answer = client.unprepare_pod(request).await?.into_inner();
                assert!(
                    answer.resources.iter().all(|of| of.outcome == "freed"),
                    "{answer:#?}"
                );
            }
        }
        Ok(())
    }

    /// No device is with two pods, containers of a pod share none, and pods are answered as before.
    async fn check(&self) {
        self.daemon.agrees().await;
        let mut taken = BTreeSet::new();
        for pod in self.daemon.pods().await {
            for of in &pod.resources {
                for id in &of.device_ids {
                    assert!(
                        taken.insert((of.resource.clone(), id.clone())),
                        "{id} is taken twice"
                    );
                }
            }
        }
        for (name, answer) in &self.known {
            assert_eq!(
                self.daemon.pod_devices(&pod(name)).await.as_ref().ok(),
                Some(answer),
                "{name}"
            );
            assert_eq!(
                self.daemon.prepare(request_of(name)).await,
                *answer,
                "{name}"
            );
        }
    }

    /// One pod can have everything.
    async fn is_empty(&self) {
        let resources = [(NIC.to_owned(), NICS), (GPU.to_owned(), GPUS)].into();
        let container = v1::Container {
            name: "main".to_owned(),
            extended_resources: resources,
            ..Default::default()
        };
        let (pod, containers) = (pod("all"), vec![container]);
        let all = v1::PreparePodRequest {
            pod: Some(pod.clone()),
            containers,
            ..Default::default()
        };
        let answer = self.daemon.prepare(all).await;
        assert!(
            answer.resources.iter().all(|of| of.outcome == "allocated"),
            "{answer:#?}"
        );
        self.daemon.unprepare(&pod).await;
        self.daemon.assert_empty().await;
    }
}

#[tokio::test]
async fn crash_during_allocation_duplicates_no_device() {
    let mut scene = Scene::start().await;
    let (started, mut deaths) = (Instant::now(), 0);
    let points = [POINTS.as_slice(), &OF_CLAIMS].concat();
    for point in points.iter().copied() {
        // A pod that leaves retries in any case.
        let pods_return: &[bool] = if LEAVING.contains(&point) {
            &[true]
        } else {
            &[true, false]
        };
        for pods_return in pods_return.iter().copied() {
            let play = async |pass| {
                scene
                    .play(Death {
                        point,
                        pass,
                        pods_return,
                    })
                    .await
            };
            deaths += every_pass(point, play).await;
        }
    }
    tell(&format!(
        "allocations: {deaths} deaths at {} points in {:.0?}",
        points.len(),
        started.elapsed()
    ));
}
