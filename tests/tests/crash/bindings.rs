//! Death at each step of a bind, of making virtual functions, and of undoing both: the node is as before afterwards.

use std::path::PathBuf;

use nodedock_base::failpoint::Point;
use nodedock_proto::node::v1;
use nodedock_tests::compose::{claim, pod, request};
use nodedock_tests::drivers::{Form, side_file, wasm};
use nodedock_tests::recorded::{Recorded, kernel_driver};
use nodedock_tests::{Daemon, Options, Root};

use crate::scene::assert_killed;
use crate::{Place, every_pass};

pub(crate) const POINTS: [Point; 4] = [
    Point::BindOverridden,
    Point::BindUnbound,
    Point::BindProbed,
    Point::ProgressSaved,
];
const OF_WRITES: [Point; 2] = [Point::SysfsWriteIntended, Point::SysfsWritten];

const VFIO: &str = "vfio-pci.nodedock.dev";
const SRIOV: &str = "sriov.nodedock.dev";
const FUNCTIONS: [&str; 2] = ["0000:01:00.0", "0000:01:00.1"];
const OWN: [&str; 2] = ["amdgpu", "snd_hda_intel"];
const PF: &str = "0000:05:00.0";

/// A machine and a driver that changes it for a claim.
struct Scene {
    daemon: Daemon,
    sys: PathBuf,
    driver: &'static str,
    /// Device as `DRIVER/POOL/DEVICE`.
    device: String,
}

impl Scene {
    async fn passthrough() -> Self {
        let root = Root::new();
        let machine = Recorded::new(
            &root.path().join("machine"),
            &["vfio-pci", "amdgpu", "snd_hda_intel"],
        );
        for (function, driver, class) in [
            (FUNCTIONS[0], OWN[0], "0x030000"),
            (FUNCTIONS[1], OWN[1], "0x040300"),
        ] {
            machine.function(function, class, driver, Some(7));
        }
        let config = "pools: [{name: gpu, select: [{class: \"0x03\"}, {class: \"0x0403\"}]}]";
        Self::of(
            root,
            &machine,
            ("vfio-pci", VFIO),
            config,
            "gpu/0000-01-00-0",
        )
        .await
    }

    async fn card() -> Self {
        let root = Root::new();
        let machine = Recorded::new(&root.path().join("machine"), &["vfio-pci", "mlx5_core"]);
        machine.card(PF);
        let config =
            "pools: [{name: vf, select: [{addresses: [\"0000:05:00.0\"]}], vfs: 4, mode: vfio}]";
        Self::of(root, &machine, ("sriov", SRIOV), config, "vf/0000-05-00-1").await
    }

    async fn of(
        root: Root,
        machine: &Recorded,
        (file, driver): (&str, &'static str),
        config: &str,
        device: &str,
    ) -> Self {
        let sys = root.path().join("run/nodedock/hardware/sys");
        root.drop_in(&format!("{file}.grant.yaml"), side_file(file, "grant"));
        root.drop_in(&format!("{file}.config.yaml"), config);
        root.drop_in(&format!("{file}.wasm"), wasm(file, Form::Core));
        let options = Options::default().arg("--hardware", machine.path().to_string_lossy());
        let daemon = Daemon::start_on(root, options).await;
        daemon.until_serving(driver).await;
        Self {
            daemon,
            sys,
            driver,
            device: format!("{driver}/{device}"),
        }
    }

    /// Starts the daemon again after it has died.
    async fn again(&mut self) {
        assert_killed(self.daemon.ended().await);
        self.daemon.disarm();
        self.daemon.run().await;
        self.daemon.until_serving(self.driver).await;
    }

    /// A prepare and an unprepare. Returns whether the daemon died on the way.
    async fn play(&mut self, point: Point, pass: u32) -> bool {
        self.daemon.kill9().await;
        self.daemon.arm(point, pass);
        self.daemon.run().await;
        self.daemon.until_serving(self.driver).await;
        let request = request(&pod("one"), &[&claim("one", &[&self.device])]);
        let mut died = false;
        if self.daemon.client().prepare_pod(request).await.is_err() {
            died = true;
            self.again().await;
        }
        let unprepare = v1::UnpreparePodRequest {
            pod: Some(pod("one")),
        };
        if self.daemon.client().unprepare_pod(unprepare).await.is_err() {
            assert!(!died, "it died twice\n{}", self.daemon.log());
            died = true;
            self.again().await;
            self.daemon.unprepare(&pod("one")).await;
        }
        died
    }

    async fn play_all(&mut self, points: &[Point], check: impl Fn(&Self)) {
        for point in points {
            every_pass(*point, async |pass| {
                let _place = Place(format!("at pass {pass} of {point:?}"));
                let died = self.play(*point, pass).await;
                self.daemon.assert_empty().await;
                check(self);
                died
            })
            .await;
        }
    }

    fn value(&self, address: &str, file: &str) -> String {
        let path = self.sys.join("devices/pci0000:00").join(address).join(file);
        std::fs::read_to_string(path)
            .expect("a file of the machine")
            .trim()
            .to_owned()
    }
}

#[tokio::test]
async fn crash_during_bind_restores_every_driver() {
    let mut scene = Scene::passthrough().await;
    let check = |scene: &Scene| {
        let drivers = FUNCTIONS.map(|function| kernel_driver(&scene.sys, function));
        assert_eq!(drivers, OWN, "{}", scene.daemon.log());
        let forced = FUNCTIONS.map(|function| scene.value(function, "driver_override"));
        assert_eq!(forced, ["(null)", "(null)"], "{}", scene.daemon.log());
    };
    scene
        .play_all(&[&POINTS[..], &OF_WRITES].concat(), check)
        .await;
}

#[tokio::test]
async fn crash_leaves_no_virtual_functions() {
    let mut scene = Scene::card().await;
    let check = |scene: &Scene| {
        assert_eq!(
            scene.value(PF, "sriov_numvfs"),
            "0",
            "{}",
            scene.daemon.log()
        )
    };
    scene
        .play_all(&[&POINTS[..], &OF_WRITES].concat(), check)
        .await;
}
