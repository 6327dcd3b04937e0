//! The driver's name: requested before the driver is called for anything but its description, and left when it belongs to another source.

use std::time::Instant;

use super::{Next, Refusal, Worker};
use nodedock_core::registry::names::{BindError, NameRefusal, NameReservation};
use nodedock_model::DriverName;

impl Worker {
    /// Reserves the name that the file describes.
    pub(super) async fn reserve_name(&self, name: &DriverName) -> Result<NameReservation, Refusal> {
        let registry = &self.shared.registry;
        registry.names.set_described(&self.source, name);
        registry
            .names
            .reserve(&self.source, name)
            .await
            .map_err(|why| self.not_named(name, why))
    }

    fn not_named(&self, name: &DriverName, why: NameRefusal) -> Refusal {
        Refusal::Name {
            name: name.clone(),
            by: self.source.clone(),
            why,
        }
    }

    pub(super) fn not_bound(&self, name: &DriverName, why: BindError) -> Refusal {
        match why {
            BindError::Refused(why) => self.not_named(name, why),
            why @ BindError::NotStored(_) => Refusal::NameNotStored {
                name: name.clone(),
                why,
            },
        }
    }

    /// Returns the next action after the owner of a name may have changed.
    pub(super) fn name_changed(&self) -> Option<Next> {
        let registry = &self.shared.registry;
        if let Some(serving) = &self.serving
            && let Some(owner) = registry.names.owner_of(&serving.driver.info().name)
            && owner != serving.source
        {
            return Some(Next::LeaveName);
        }
        let awaited = self.awaited_name.as_ref()?;
        registry
            .names
            .may_have(&self.source, awaited)
            .then_some(Next::Load("name free"))
    }

    /// Takes the serving version out of service, since its name belongs to another source. Its running calls continue.
    pub(super) fn leave_name(&mut self) {
        let Some(serving) = &self.serving else { return };
        let name = serving.driver.info().name.clone();
        let Some(owner) = self.shared.registry.names.owner_of(&name) else {
            return;
        };
        let refusal = self.not_named(&name, NameRefusal::Belongs(owner));
        self.retire();
        self.show(|view| view.devices = 0);
        self.refused(&refusal, Instant::now(), "name");
        self.awaited_name = Some(name);
    }
}
