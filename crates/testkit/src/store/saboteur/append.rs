//! Breaking the rules of Append.

use async_trait::async_trait;
use store::{Append, Appended, Error, NewMessage, Turned};

use super::{Sabotage, Saboteur};

#[async_trait]
impl Append for Saboteur {
    async fn append(&self, mut messages: Vec<NewMessage>) -> Result<Vec<Result<Appended, Turned>>, Error> {
        if self.breaks(Sabotage::WritesLater) {
            let answers = messages.iter().map(|new| Ok(Appended::New(new.message.id))).collect();
            let earlier = std::mem::replace(&mut *self.memory.late(), messages);
            self.store.append(earlier).await?;
            return Ok(answers);
        }
        if self.breaks(Sabotage::ForgetsOnceKeys) {
            messages.iter_mut().for_each(|new| new.once = None);
        }
        let backwards = self.breaks(Sabotage::AppendsBackwards);
        if backwards {
            messages.reverse();
        }
        let ids: Vec<_> = messages.iter().map(|new| new.message.id).collect();
        let mut results = self.store.append(messages).await?;
        if backwards || self.breaks(Sabotage::ReversesResults) {
            results.reverse();
        }
        for (result, id) in results.iter_mut().zip(ids) {
            if *result == Err(Turned::KeyTaken) && self.breaks(Sabotage::IgnoresFingerprints) {
                *result = Ok(Appended::Repeated(id));
            }
        }
        if results.iter().any(Result::is_err) && self.breaks(Sabotage::TurnsAwayTheWholeCall) {
            for result in &results {
                if let Ok(Appended::New(id)) = result {
                    self.store.delete(*id, "saboteur").await?;
                }
            }
        }
        Ok(results)
    }
}
