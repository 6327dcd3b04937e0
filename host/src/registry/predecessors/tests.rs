use super::*;
use crate::driver::wasm::tests::Stage;
use crate::driver::wasm::tests::guest::NAME;
use crate::trust::Policy;

struct Scene {
    kept: KeptDrivers,
    name: DriverName,
}

impl Scene {
    fn new() -> Self {
        let stage = Stage::new();
        let files = KeptFiles::open(stage.folder.path()).unwrap();
        let kept = KeptDrivers::open(files, stage.host.clone(), Trust::new(Policy::default())).unwrap();
        Self { kept, name: DriverName::new(NAME).unwrap() }
    }

    fn grant(&self) -> Option<Grant> {
        self.kept.grant_of(&self.name)
    }
}

impl KeptDrivers {
    /// What a name's predecessors may do.
    pub(in crate::registry) fn grant_of(&self, name: &DriverName) -> Option<Grant> {
        self.state().grants.get(name).map(|known| (*known.grant).clone())
    }
}

fn grant(text: &str) -> Grant {
    Grant::parse(&format!("apiVersion: nodedock.dev/v1\nkind: DriverGrant\n{text}")).unwrap()
}

/// A file that gave its name up said so after another had the name, whose predecessors could not be asked any more.
#[test]
fn a_file_that_leaves_a_name_takes_nothing_from_the_one_that_has_it_now() {
    let scene = Scene::new();
    let (name, wide) = (&scene.name, grant("env: [A]"));
    for others in [wide.clone(), grant("env: [B]")] {
        scene.kept.granted(name, "a.wasm", &wide);
        scene.kept.granted(name, "b.wasm", &others);
        scene.kept.left(name, "a.wasm");
        assert_eq!(scene.grant(), Some(others));
        scene.kept.left(name, "b.wasm");
        assert_eq!(scene.grant(), None);
    }
}
