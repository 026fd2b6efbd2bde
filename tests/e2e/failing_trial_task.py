"""A task whose loss fails for a copy of the model in evaluation, as only the trial of a partner's
weights makes one.
"""

from shoal.node.templates.pretrain.task import Pretrain


class Failing(Pretrain):
    evaluating = False

    def evaluate(self, model):
        self.evaluating = True
        try:
            return super().evaluate(model)
        finally:
            self.evaluating = False

    def loss(self, model, batch):
        if not model.training and not self.evaluating:
            raise RuntimeError("planted in the trial")
        return super().loss(model, batch)
