//! A list with an entry for each device, counter or request, which is read and written by number.

/// A number without an entry reads as the default, and a write to it is ignored.
#[derive(Debug, Clone, Default)]
pub(super) struct Table<T>(Vec<T>);

impl<T: Copy + Default> Table<T> {
    pub(super) fn new(len: usize) -> Self {
        Self(vec![T::default(); len])
    }

    pub(super) fn get(&self, number: u32) -> T {
        self.0.get(number as usize).copied().unwrap_or_default()
    }

    pub(super) fn set(&mut self, number: u32, value: T) {
        if let Some(entry) = self.0.get_mut(number as usize) {
            *entry = value;
        }
    }
}
